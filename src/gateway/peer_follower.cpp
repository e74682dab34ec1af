#include "gateway/peer_follower.hpp"

#include <algorithm>

#include "gateway/peer_server.hpp"

namespace semel::gateway {

using namespace std::chrono_literals;

namespace {

/// An owner that does not take a connection, or says nothing on it, within these is asked for its
/// record instead: together less than a second, in which nobody looks at the record.
constexpr auto connect_patience = 400ms;
constexpr auto hello_patience = 500ms;
/// How often the record of a lost owner is looked at, at most and at least.
constexpr auto look_min = 20ms;
constexpr auto look_max = 500ms;
/// Between two connections to an owner that broke one off and still holds its lease.
constexpr auto connect_again_first = 250ms;
constexpr auto connect_again_max = 4s;

}  // namespace

LostOwner judge_lost_owner(const core::RecordPtr& record, core::FencingToken token,
                           core::StoreTime at, bool grace) {
    if (!record || record->token != token) return LostOwner::over;
    switch (record->status) {
        case core::Status::processing:
            return record->lease_end > at || grace ? LostOwner::wait : LostOwner::over;
        case core::Status::completed:
            return LostOwner::complete;
        case core::Status::failed:
        case core::Status::unknown:
        case core::Status::dead:
            return LostOwner::over;
    }
    return LostOwner::over;
}

bool PeerFollower::may_follow(const core::Owner& owner) const {
    return state_.peer_secret != nullptr && !owner.peer.empty() &&
           owner.id != engine_.options().owner.id;
}

void PeerFollower::end(const FlightPtr& flight, const core::StoredKey& key, Ending ending) {
    state_.flights.leave(key, flight);
    Journal& journal = flight->journal();
    if (ending == Ending::whole || ending == Ending::cut) {
        flight->done();
        return;
    }
    // Who has had a byte of it is cut, who has had none looks again.
    journal.drop_held();
    journal.finish(Journal::End::cut, {});
    flight->move_on();
}

Task<PeerFollower::Followed> PeerFollower::follow(FlightPtr flight, core::StoredKey key,
                                                  core::InFlight in_flight) {
    state_.metrics.peer_follows.add();
    const PeerQuestion question{.key = key, .token = in_flight.token};
    const Ending ending = co_await read(flight, question, in_flight.owner.peer);
    const bool untouched = !flight->journal().view().has_head;
    if (ending == Ending::gone || ending == Ending::broken || ending == Ending::moved_on) {
        if (ending == Ending::broken) state_.metrics.peer_fallbacks.add();
        if (untouched)
            co_return ending == Ending::broken ? Followed::lost : Followed::ask_again;
        if (ending != Ending::moved_on) {
            co_await recover(flight, key, std::move(in_flight));
            co_return Followed::ended;
        }
    }
    end(flight, key, ending);
    co_return Followed::ended;
}

/// One connection to the owner, to its end.
Task<PeerFollower::Ending> PeerFollower::read(FlightPtr flight, PeerQuestion question,
                                              std::string peer) {
    const auto origin = http::parse_origin("http://" + peer);
    if (!origin) co_return Ending::broken;
    const std::string nonce = base::base64url(base::random_bytes(peer_nonce_bytes));
    const std::string target = peer_target(question);
    http::Request request{.method = "GET", .target = target};
    request.headers.append("Authorization: ").append(peer_scheme);
    request.headers.append(peer_proof(*state_.peer_secret, target, nonce)).append("\r\n");
    request.headers.append(peer_nonce_header).append(": ").append(nonce).append("\r\n");
    const http::Timeouts timeouts{.connect = connect_patience,
                                  .first_byte = hello_patience,
                                  .idle = peer_silence_max(engine_.options().lease)};
    auto answer = co_await client_.call(*origin, std::move(request), timeouts, nullptr);
    if (std::holds_alternative<http::CallError>(answer)) co_return Ending::broken;
    const auto response = std::get<std::unique_ptr<http::Response>>(std::move(answer));
    if (response->status() != 200) co_return Ending::broken;
    co_return co_await take(*flight, *response, nonce);
}

Task<PeerFollower::Ending> PeerFollower::take(Flight& flight, http::Response& response,
                                              std::string_view nonce) {
    Journal& journal = flight.journal();
    PeerReader reader;
    for (;;) {
        auto bytes = co_await response.read_some();
        if (flight.followers() == 0) co_return Ending::left;
        if (std::holds_alternative<http::CallError>(bytes)) co_return Ending::broken;
        const std::string_view piece = std::get<std::string_view>(bytes);
        if (piece.empty()) co_return Ending::broken;  // without the frame that ends it
        reader.feed(piece);
        bool changed = false;
        std::optional<PeerEnd> ended;
        bool sound = true;
        while (sound && !ended) {
            const auto frame = reader.next();
            if (!frame) break;
            if (const auto* hello = std::get_if<PeerHello>(&*frame)) {
                const base::Digest expected = peer_answer_proof(*state_.peer_secret, nonce);
                sound = base::equal_constant_time(hello->proof.view(), expected.view());
            } else if (const auto* head = std::get_if<PeerHead>(&*frame)) {
                if (journal.view().has_head) continue;  // of an earlier connection
                flight.follows(head->attempt, head->takeover);
                journal.set_head({.status = head->status,
                                  .content_type = head->content_type,
                                  .kept_headers = head->kept_headers,
                                  .live_headers = {},
                                  .content_length = head->content_length,
                                  .from_gateway = head->from_gateway},
                                 head->streaming);
                changed = changed || head->streaming;
            } else if (const auto* data = std::get_if<PeerData>(&*frame)) {
                if (data->last) {
                    sound = journal.append_held(data->bytes);
                } else {
                    sound = journal.stored() == journal.view().bytes && journal.append(data->bytes);
                    changed = true;
                }
            } else if (const auto* end_frame = std::get_if<PeerEnd>(&*frame)) {
                ended = *end_frame;
            }
        }
        if (changed) flight.changed().notify();
        if (!sound || reader.state() == PeerReader::State::refused) co_return Ending::broken;
        if (!ended) continue;
        switch (ended->how) {
            case PeerEnd::How::whole:
                if (ended->record_pending) state_.metrics.record_pending.add();
                journal.finish(Journal::End::whole, {}, ended->record_pending, ended->expires);
                co_return Ending::whole;
            case PeerEnd::How::cut:
                journal.finish(Journal::End::cut, {});
                co_return Ending::cut;
            case PeerEnd::How::moved_on:
                co_return Ending::moved_on;
            case PeerEnd::How::gone:
                co_return Ending::gone;
        }
    }
}

/// The owner was lost in the middle of its answer: the rest comes from the record, or from the
/// owner again, or never.
Task<> PeerFollower::recover(FlightPtr flight, core::StoredKey key, core::InFlight in_flight) {
    Loop& loop = engine_.loop();
    std::chrono::milliseconds connect_again = connect_again_first;
    SteadyTime next_connection = loop.now() + connect_again;
    while (flight->followers() != 0) {
        std::chrono::nanoseconds wait = look_max;
        const auto looked = co_await engine_.ask({key, core::Get{}});
        if (looked) {
            const auto* found = std::get_if<core::Found>(&looked->outcome);
            const core::RecordPtr record = found != nullptr ? found->record : nullptr;
            const bool grace = engine_.grace_left() > 0ms;
            const LostOwner verdict =
                judge_lost_owner(record, in_flight.token, looked->at, grace);
            if (verdict == LostOwner::over) break;
            if (verdict == LostOwner::complete) {
                const bool whole = co_await append_record(*flight, key, record);
                end(flight, key, whole ? Ending::whole : Ending::moved_on);
                co_return;
            }
            wait = std::clamp<std::chrono::nanoseconds>((record->lease_end - looked->at) / 4,
                                                        look_min, look_max);
        }
        co_await loop.sleep_for(wait);
        if (loop.now() < next_connection) continue;
        const PeerQuestion question{
            .key = key, .token = in_flight.token, .from = flight->journal().stored()};
        const Ending ending = co_await read(flight, question, in_flight.owner.peer);
        if (ending != Ending::broken && ending != Ending::gone) {
            end(flight, key, ending);
            co_return;
        }
        connect_again = std::min<std::chrono::milliseconds>(connect_again * 2, connect_again_max);
        next_connection = loop.now() + connect_again;
    }
    end(flight, key, Ending::moved_on);
}

/// The recorded answer from where the journal stands, and its end. False: it is not this answer's
/// rest, or it is not there.
Task<bool> PeerFollower::append_record(Flight& flight, core::StoredKey key,
                                       core::RecordPtr record) {
    Journal& journal = flight.journal();
    const std::uint64_t stored = journal.stored();
    if (!record->answer || record->answer->http_status != journal.head().status ||
        record->answer->body_bytes < stored)
        co_return false;
    const core::Answer& answer = *record->answer;
    if (answer.body_kind == core::BodyKind::inline_body) {
        if (answer.body == nullptr || answer.body->size() < stored) co_return false;
        journal.finish(Journal::End::whole,
                       std::string_view(*answer.body).substr(static_cast<std::size_t>(stored)),
                       false, record->expires);
        co_return journal.view().end == Journal::End::whole;
    }
    if (answer.body_kind != core::BodyKind::chunks) co_return false;
    base::Sha256 digest;
    std::uint64_t position = 0;
    for (std::uint32_t n = 0; n < answer.chunk_count; ++n) {
        const auto read = co_await engine_.ask({key, core::GetChunk{record->token, n}}, record->tenant);
        const auto* found = read ? std::get_if<core::ChunkFound>(&read->outcome) : nullptr;
        if (found == nullptr) co_return false;
        const std::string_view chunk = found->bytes;
        digest.update(chunk);
        const std::uint64_t known = std::min<std::uint64_t>(
            chunk.size(), stored > position ? stored - position : 0);
        position += chunk.size();
        if (known == chunk.size()) continue;
        if (!journal.append_held(chunk.substr(static_cast<std::size_t>(known)))) co_return false;
    }
    if (digest.finish() != answer.body_digest) co_return false;
    journal.finish(Journal::End::whole, {}, false, record->expires);
    co_return true;
}

}  // namespace semel::gateway
