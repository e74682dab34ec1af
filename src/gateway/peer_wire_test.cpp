#include "gateway/peer_wire.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "gateway/journal.hpp"
#include "gateway/peer_follower.hpp"

namespace semel::gateway {
namespace {

using namespace std::chrono_literals;
using State = PeerReader::State;

std::string frame(const PeerFrame& one) {
    std::string out;
    write_frame(out, one);
    return out;
}

/// A frame as bytes, whether it is allowed or not.
std::string raw(char kind, std::string_view payload) {
    std::string out(1, kind);
    for (int shift = 24; shift >= 0; shift -= 8)
        out += static_cast<char>(static_cast<std::uint8_t>(payload.size() >> shift));
    return out.append(payload);
}

const PeerHead head{.status = 201,
                    .content_type = "text/event-stream",
                    .kept_headers = "x-request-id: r1\r\nX-Empty: \r\n",
                    .content_length = 1'000'000,
                    .attempt = 7,
                    .streaming = true,
                    .from_gateway = true,
                    .takeover = true};

std::string hello() { return frame(PeerHello{base::sha256("proof")}); }

/// What a reader made of `bytes` given in pieces of `step`.
struct Read {
    std::vector<std::size_t> kinds;
    std::optional<PeerHead> head;
    std::optional<PeerEnd> end;
    std::string data, last;
    State state = State::open;
    std::string_view refusal;
};
Read read(std::string_view bytes, std::size_t step) {
    Read out;
    PeerReader reader;
    for (std::size_t at = 0; at < bytes.size(); at += step) {
        reader.feed(bytes.substr(at, step));
        while (const auto next = reader.next()) {
            out.kinds.push_back(next->index());
            if (const auto* h = std::get_if<PeerHead>(&*next)) out.head = *h;
            if (const auto* d = std::get_if<PeerData>(&*next))
                (d->last ? out.last : out.data) += d->bytes;
            if (const auto* e = std::get_if<PeerEnd>(&*next)) out.end = *e;
        }
    }
    out.state = reader.state();
    out.refusal = reader.refusal();
    return out;
}

TEST(PeerWire, a_flight_is_read_back_as_written_however_its_bytes_are_cut) {
    const std::string big(peer_data_max_bytes, 'x');
    std::string bytes = hello();
    for (const PeerFrame& one : std::vector<PeerFrame>{
             PeerPing{}, head, PeerData{.bytes = "abc"}, PeerPing{}, PeerData{.bytes = big},
             PeerData{.bytes = "de", .last = true}, PeerPing{},
             PeerData{.bytes = "f", .last = true},
             PeerEnd{.how = PeerEnd::How::whole, .record_pending = true, .expires = {1234567}}})
        write_frame(bytes, one);
    for (const std::size_t step : {std::size_t{1}, std::size_t{7}, bytes.size()}) {
        const Read got = read(bytes, step);
        EXPECT_EQ(got.state, State::ended) << got.refusal;
        EXPECT_EQ(got.data, "abc" + big);
        EXPECT_EQ(got.last, "def");
        ASSERT_TRUE(got.head);
        EXPECT_EQ(got.head->status, 201);
        EXPECT_EQ(got.head->content_type, head.content_type);
        EXPECT_EQ(got.head->kept_headers, head.kept_headers);
        EXPECT_EQ(got.head->content_length, head.content_length);
        EXPECT_EQ(got.head->attempt, 7u);
        EXPECT_TRUE(got.head->streaming && got.head->from_gateway && got.head->takeover);
        ASSERT_TRUE(got.end);
        EXPECT_EQ(got.end->how, PeerEnd::How::whole);
        EXPECT_TRUE(got.end->record_pending);
        EXPECT_EQ(got.end->expires.us, 1234567);
        EXPECT_EQ(got.kinds.size(), 10u);
    }
    const Read short_one = read(std::string_view(bytes).substr(0, bytes.size() - 1), 100);
    EXPECT_EQ(short_one.state, State::open) << "an end that is not all there is no end";
    EXPECT_FALSE(short_one.end);
}

TEST(PeerWire, every_malformed_input_is_refused_and_nothing_after_it_is_read) {
    const std::string sound_head = frame(head);
    const std::string start = hello() + sound_head;
    const auto plain_head = [](std::uint8_t flags, std::string rest) {
        return raw('A', std::string("\x00\xc8", 2) + static_cast<char>(flags) +
                            std::string("\0\0\0\1", 4) + rest);
    };
    const std::string type_0("\0\0", 2);
    std::string long_data = raw('D', std::string(peer_data_max_bytes + 1, 'x'));
    const std::string whole = frame(PeerEnd{.how = PeerEnd::How::whole});
    struct Case {
        const char* name;
        std::string bytes;
    };
    const Case cases[] = {
        {"no hello", sound_head},
        {"a ping before the hello", frame(PeerPing{})},
        {"two hellos", hello() + hello()},
        {"another version", raw('H', "\2" + std::string(32, 'p'))},
        {"a short hello", raw('H', "\1proof")},
        {"a long hello", raw('H', "\1" + std::string(33, 'p'))},
        {"an unknown kind", hello() + raw('X', "")},
        {"a kind of zero", hello() + std::string(5, '\0')},
        {"a ping with content", hello() + raw('P', "x")},
        {"a length of 4 GiB", hello() + "D\xff\xff\xff\xff"},
        {"data of one byte too many", start + long_data},
        {"empty data", start + raw('D', "")},
        {"data before the head", hello() + raw('D', "x")},
        {"two heads", start + sound_head},
        {"data after the last bytes", start + raw('L', "x") + raw('D', "y")},
        {"a head that is too short", hello() + raw('A', std::string(8, '\1'))},
        {"a status of 199", hello() + raw('A', std::string("\0\xc7\0\0\0\0\1\0\0", 9))},
        {"a status of 600", hello() + raw('A', std::string("\2\x58\0\0\0\0\1\0\0", 9))},
        {"an attempt of 0", hello() + raw('A', std::string("\0\xc8\0\0\0\0\0\0\0", 9))},
        {"unknown flags in a head", hello() + plain_head(16, type_0)},
        {"a head whose length is cut off", hello() + plain_head(8, std::string(4, '\0'))},
        {"a content type longer than the frame", hello() + plain_head(0, std::string("\0\5ab", 4))},
        {"a content type that is too long",
         hello() + plain_head(0, std::string("\4\1", 2) + std::string(1025, 'a'))},
        {"headers that are too long",
         hello() + plain_head(0, type_0 + "a: " + std::string(peer_headers_max_bytes, 'b') +
                                     "\r\n")},
        {"a content type with a line end", hello() + plain_head(0, std::string("\0\3a\r\n", 5))},
        {"a header without a colon", hello() + plain_head(0, type_0 + "ab\r\n")},
        {"a header without a name", hello() + plain_head(0, type_0 + ": b\r\n")},
        {"a header name with a blank", hello() + plain_head(0, type_0 + "a b: c\r\n")},
        {"a header without a line end", hello() + plain_head(0, type_0 + "a: b")},
        {"a header value with a bare CR", hello() + plain_head(0, type_0 + "a: b\rc\r\n")},
        {"a header value with a bare LF", hello() + plain_head(0, type_0 + "a: b\nc: d\r\n")},
        {"a header value with a NUL",
         hello() + plain_head(0, type_0 + std::string("a: \0\r\n", 6))},
        {"a blank line among headers", hello() + plain_head(0, type_0 + "a: b\r\n\r\nc: d\r\n")},
        {"a whole answer without a head", hello() + whole},
        {"a cut answer without a head", hello() + frame(PeerEnd{.how = PeerEnd::How::cut})},
        {"a short end", start + raw('E', std::string(9, '\1'))},
        {"an end of kind 0", start + raw('E', std::string(10, '\0'))},
        {"an end of kind 5", start + raw('E', "\5" + std::string(9, '\0'))},
        {"unknown flags in an end", start + raw('E', std::string("\1\2", 2) + std::string(8, '\0'))},
        {"a negative expiry", start + raw('E', std::string("\1\0", 2) + std::string(8, '\xff'))},
        {"a frame after the end", start + whole + frame(PeerPing{})},
        {"a byte after the end", start + whole + "x"},
    };
    for (const Case& one : cases) {
        for (const std::size_t step : {std::size_t{1}, one.bytes.size()}) {
            const Read got = read(one.bytes, step);
            EXPECT_EQ(got.state, State::refused) << one.name << ", in pieces of " << step;
            EXPECT_FALSE(got.refusal.empty()) << one.name;
        }
    }
    PeerReader reader;
    reader.feed(sound_head);
    EXPECT_FALSE(reader.next());
    reader.feed(hello());
    EXPECT_FALSE(reader.next()) << "a refused reader reads no more";
}

TEST(PeerWire, a_target_names_key_token_and_offset_and_nothing_else_is_one) {
    const PeerQuestion question{.key = base::sha256("k"), .token = {123}, .from = 0};
    const std::string target = peer_target(question);
    EXPECT_EQ(parse_peer_target(target), question);
    PeerQuestion later = question;
    later.from = 77;
    EXPECT_EQ(parse_peer_target(peer_target(later)), later);
    for (const std::string& wrong :
         std::initializer_list<std::string>{"/", "/flights/", target.substr(0, target.find('?')),
          target + "x", target + "&from=", target + "&from=1x", target + "&from=-1",
          target + "&from=1&from=2", target + "99999999999999999999",
          "/flights/short?token=1", "/flights/" + std::string(43, '!') + "?token=1",
          target.substr(1), "/other" + target, target.substr(0, target.find('=') + 1)}) {
        EXPECT_FALSE(parse_peer_target(wrong)) << wrong;
    }
}

TEST(PeerWire, a_proof_is_for_one_secret_one_target_and_one_nonce) {
    const base::Hmac secret("s");
    const std::string proof = peer_proof(secret, "/flights/a?token=1", "n");
    EXPECT_EQ(proof, peer_proof(secret, "/flights/a?token=1", "n"));
    EXPECT_NE(proof, peer_proof(base::Hmac("t"), "/flights/a?token=1", "n"));
    EXPECT_NE(proof, peer_proof(secret, "/flights/a?token=2", "n"));
    EXPECT_NE(proof, peer_proof(secret, "/flights/a?token=1", "m"));
    EXPECT_NE(peer_answer_proof(secret, "n"), peer_answer_proof(secret, "m"));
}

TEST(LostOwner, is_waited_for_only_while_its_own_attempt_can_still_complete) {
    core::Record record;
    record.token = {5};
    record.lease_end = {1000};
    const auto judge = [&](std::uint64_t token, std::int64_t at, bool grace = false) {
        return judge_lost_owner(std::make_shared<const core::Record>(record), {token}, {at}, grace);
    };
    EXPECT_EQ(judge_lost_owner(nullptr, {5}, {0}, false), LostOwner::over);
    EXPECT_EQ(judge(5, 999), LostOwner::wait);
    EXPECT_EQ(judge(5, 1000), LostOwner::over) << "a dead lease";
    EXPECT_EQ(judge(5, 1000, true), LostOwner::wait) << "it could not renew: the store was out";
    EXPECT_EQ(judge(4, 999), LostOwner::over) << "another attempt has begun";
    record.status = core::Status::completed;
    EXPECT_EQ(judge(5, 2000), LostOwner::complete);
    EXPECT_EQ(judge(4, 2000), LostOwner::over) << "another attempt's answer";
    for (const core::Status status :
         {core::Status::failed, core::Status::unknown, core::Status::dead}) {
        record.status = status;
        EXPECT_EQ(judge(5, 0), LostOwner::over);
    }
}

}  // namespace
}  // namespace semel::gateway
