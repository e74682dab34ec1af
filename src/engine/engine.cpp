#include "engine/engine.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>
#include <utility>

#include "base/fault_point.hpp"
#include "base/hash.hpp"
#include "engine/batcher.hpp"
#include "engine/tenant_keys.hpp"
#include "runtime/signal.hpp"

namespace semel::engine {

using base::Error;
using base::ErrorCode;
using core::Decided;
using core::Fenced;
using core::Nonce;
using core::RecordPtr;

namespace {

template <class... F>
struct Overloaded : F... {
    using F::operator()...;
};

/// A grant must have this part of its lease left when it reaches its owner, else it is given back.
constexpr int margin_part = 5;
/// An acquire that came after its not_after (the store's clock is ahead of what we knew) is asked
/// again this often.
constexpr int late_acquires_max = 3;
/// Between two tries of a client that waits.
constexpr milliseconds foreground_backoff_first{10};
constexpr milliseconds foreground_backoff_max{200};
/// Between two tries in the background.
constexpr milliseconds background_backoff_first{50};
constexpr milliseconds background_backoff_max{2000};
/// How long stop() waits for what runs in the background.
constexpr milliseconds stop_patience{1000};

Place chunk_place(const StoredKey& key, std::uint32_t n) {
    return {.kind = Place::Kind::chunk, .of = key, .n = n};
}

class Backoff {
  public:
    Backoff(milliseconds first, milliseconds max) : next_(first), max_(max) {}
    milliseconds next() { return std::exchange(next_, std::min(next_ * 2, max_)); }

  private:
    milliseconds next_;
    milliseconds max_;
};

}  // namespace

class Engine::Impl {
  public:
    Impl(Engine& engine, HotRecords& hot, Spool& spool, Vault* vault)
        : engine_(engine),
          loop_(engine.loop_),
          store_(engine.store_),
          options_(engine.options_),
          counters_(engine.counters_),
          hot_(hot),
          spool_(spool),
          vault_(vault),
          batcher_(loop_, store_,
                   [this](StoreTime at, SteadyTime sent, SteadyTime answered) {
                       watch_clock(at, sent, answered);
                   }),
          keys_(loop_, batcher_, vault, options_.acquire_patience, counters_.store_errors,
                [this](Task<> task) {
                    if (!stopping_) in_background(std::move(task));
                }) {
        const std::string seed = base::random_bytes(sizeof nonce_base_);
        std::memcpy(&nonce_base_, seed.data(), sizeof nonce_base_);
        if (!options_.delivers_left_over) return;
        for (const StoredKey& key : spool_.keys()) in_background(deliver_left_over(key));
    }

    ~Impl() {
        loop_.cancel(tick_timer_);
        // Guards may outlive the engine inside coroutines that the loop destroys later.
        for (LeaseGuard* lease : leases_) lease->id_ = 0;
    }

    // ---------------------------------------------------------------- operations

    Task<Result<Acquired>> acquire(AcquireRequest request) {
        if (stopping_) co_return stopping();
        if (spool_.size() != 0) {
            while (auto entry = spool_.find(request.key)) {
                const bool decided = co_await deliver_once(std::move(*entry));
                // As long as a paid answer of this key waits to be recorded, nobody here may pay
                // for another.
                if (!decided)
                    co_return unavailable(
                        "an answer of this intent waits in the spool until the store takes it");
            }
        }
        if (engine_.grace_left().count() > 0) {
            auto early = co_await in_grace(request);
            if (!early || early->refused) co_return early;
        }
        DataKeyPtr data_key;
        if (keys_.sealed(request.tenant)) {
            data_key = keys_.ready(request.tenant);
            if (!data_key) {
                auto asked = co_await keys_.ask(request.tenant);
                if (!asked) {
                    // What is in memory is given out while the store cannot be asked for more.
                    if (RecordPtr hot = find_hot(request.key)) {
                        ++counters_.replays;
                        co_return Acquired{nullptr, core::Replay{std::move(hot)}, store_.now()};
                    }
                    co_return std::move(asked.error());
                }
                data_key = std::move(*asked);
            }
            data_key->hide(request.key, request.fingerprint);
            if (request.turn) {
                auto turn = std::make_shared<core::Append>(*request.turn);
                data_key->seal(*turn, vault_->stored_id(turn->conversation, turn->request_id));
                request.turn = std::move(turn);
            }
        }
        for (int tries = 0; tries < late_acquires_max; ++tries) {
            const Nonce nonce = fresh_nonce();
            const SteadyTime asked_at = loop_.now();
            const StoreTime not_after = store_.now() + options_.acquire_patience;
            core::Acquire operation{.fingerprint = request.fingerprint,
                                    .owner = options_.owner,
                                    .nonce = nonce,
                                    .lease = options_.lease,
                                    .not_after = not_after,
                                    .policy = request.policy,
                                    .starts_call = request.starts_call,
                                    .label = request.label,
                                    .tenant = request.tenant,
                                    .turn = request.turn};
            core::Item item{request.key, std::move(operation)};
            auto reply =
                co_await batcher_.call(std::move(item), asked_at + options_.acquire_patience);
            if (!reply) {
                ++counters_.store_errors;
                if (reply.error().applied == base::Applied::no) co_return std::move(reply.error());
                // No answer may be acted on any more: the grant could be executed, or arrive, at
                // any time until not_after.
                in_background(settle(request.key, nonce, not_after));
                co_return unavailable("the store did not answer whether this intent is granted; " +
                                      reply.error().detail);
            }
            if (std::holds_alternative<core::Late>(reply->outcome)) continue;
            auto* granted = std::get_if<core::Granted>(&reply->outcome);
            count(reply->outcome);
            if (granted == nullptr) {
                open_answered(request.key, reply->outcome, data_key.get());
                remember(request.key, reply->outcome, data_key.get());
                co_return Acquired{nullptr, std::move(reply->outcome), reply->at};
            }
            if (loop_.now() > asked_at + usable_for()) {
                in_background(settle(request.key, nonce, not_after));
                co_return unavailable(
                    "the store's grant came too late to be used and is given back");
            }
            auto lease =
                std::make_unique<LeaseGuard>(engine_, request.key, *granted, nonce, asked_at,
                                             std::move(request.fingerprint), request.policy);
            lease->data_key_ = std::move(data_key);
            base::fault_point("engine.acquired");
            co_return Acquired{std::move(lease), std::nullopt, reply->at};
        }
        co_return Error{.code = ErrorCode::too_late,
                        .applied = base::Applied::no,
                        .retry_after = std::chrono::seconds{1},
                        .detail = "the store's clock was past the time limit of each of " +
                                  std::to_string(late_acquires_max) +
                                  " acquires: check the store's clock"};
    }

    Task<Result<bool>> start(LeaseGuard& lease) {
        core::Item item{lease.key_, core::Start{lease.token(), lease.nonce_}};
        auto reply =
            co_await batcher_.call(std::move(item), loop_.now() + options_.acquire_patience);
        if (!reply) {
            ++counters_.store_errors;
            co_return std::move(reply.error());
        }
        if (std::holds_alternative<core::Applied>(reply->outcome)) co_return true;
        ++counters_.fenced;
        co_return false;
    }

    Task<Result<void>> put_chunk(LeaseGuard& lease, std::uint32_t n, std::string bytes,
                                 std::optional<SteadyTime> until) {
        if (lease.data_key_) {
            bytes = lease.data_key_->seal(chunk_place(lease.key_, n), bytes);
        }
        core::Item item{lease.key_, core::PutChunk{lease.token(), n, std::move(bytes)}};
        auto reply = co_await batcher_.call(std::move(item), step_end(until));
        if (!reply) {
            ++counters_.store_errors;
            co_return std::move(reply.error());
        }
        co_return Result<void>{};
    }

    Task<Completion> complete(LeaseGuard& lease, core::Answer answer, core::Usage usage,
                              std::optional<core::Append> append,
                              std::vector<std::string> unwritten, std::optional<SteadyTime> until) {
        base::fault_point("engine.complete.before");
        const SteadyTime deadline = until.value_or(loop_.now() + options_.record_patience);
        const std::shared_ptr<const std::string> plain = answer.body;
        if (lease.data_key_) {
            lease.data_key_->seal(lease.key_, answer);
            if (append) {
                std::string id = vault_->stored_id(append->conversation, append->request_id);
                lease.data_key_->seal(*append, std::move(id));
            }
            for (std::uint32_t n = 0; n < unwritten.size(); ++n)
                unwritten[n] = lease.data_key_->seal(chunk_place(lease.key_, n), unwritten[n]);
        }
        Delivery delivery(
            SpoolEntry{.key = lease.key_,
                       .complete = {lease.token(), lease.nonce_, std::move(answer),
                                    std::move(usage), std::move(append)},
                       .fingerprint = lease.fingerprint_,
                       .policy = lease.policy_,
                       .tenant = lease.data_key_ ? lease.data_key_->tenant() : core::TenantTag{},
                       .chunks = std::move(unwritten)});
        delivery.data_key = lease.data_key_;
        delivery.plain = plain;
        Backoff backoff(foreground_backoff_first, foreground_backoff_max);
        std::optional<Completion> done;
        while (loop_.now() < deadline) {
            done = co_await try_record(delivery, deadline);
            if (done) break;
            const SteadyTime again = loop_.now() + backoff.next();
            if (again >= deadline) break;
            co_await loop_.sleep_until(again);
        }
        settle_guard(lease);
        base::fault_point("engine.complete.after");
        if (done) co_return std::move(*done);
        ++counters_.spooled;
        if (auto kept = spool_.put(delivery.entry); !kept)
            ++counters_.store_errors;  // it stays in memory
        delivery.spooled_as = delivery.entry.complete.token;
        in_background(deliver(std::move(delivery)));
        co_return Completion{Completion::Kind::pending, nullptr};
    }

    Task<RecordPtr> fail(LeaseGuard& lease, core::Fail failure) {
        failure.token = lease.token();
        failure.nonce = lease.nonce_;
        if (lease.data_key_ && failure.answer) lease.data_key_->seal(lease.key_, *failure.answer);
        const SteadyTime deadline = loop_.now() + options_.record_patience;
        Backoff backoff(foreground_backoff_first, foreground_backoff_max);
        RecordPtr record;
        for (;;) {
            core::Item item{lease.key_, failure};
            auto reply = co_await batcher_.call(std::move(item), deadline);
            if (reply) {
                if (const auto* fenced = std::get_if<Fenced>(&reply->outcome)) {
                    ++counters_.fenced;
                    record = fenced->record;
                } else if (const auto* applied = std::get_if<core::Applied>(&reply->outcome)) {
                    record = applied->record;
                    if (record->status == core::Status::unknown) ++counters_.unknown_outcomes;
                }
                break;
            }
            ++counters_.store_errors;
            const SteadyTime again = loop_.now() + backoff.next();
            if (again >= deadline) break;
            co_await loop_.sleep_until(again);
        }
        settle_guard(lease);
        co_return opened(lease.key_, std::move(record), lease.data_key_.get());
    }

    Task<> release(LeaseGuard& lease) {
        core::Item item{lease.key_, core::Release{lease.token(), lease.nonce_}};
        auto reply =
            co_await batcher_.call(std::move(item), loop_.now() + options_.record_patience);
        settle_guard(lease);
        if (reply) co_return;
        ++counters_.store_errors;
        in_background(settle(lease.key_, lease.nonce_, StoreTime{}));
    }

    Task<Result<RecordPtr>> get(StoredKey key) {
        if (RecordPtr hot = find_hot(key)) co_return hot;
        core::Item item{key, core::Get{}};
        auto reply = co_await ask(std::move(item), {});
        if (!reply) {
            if (vault_ != nullptr) vault_->no_mark();
            if (RecordPtr hot = find_hot(key)) co_return hot;
            co_return std::move(reply.error());
        }
        const auto* found = std::get_if<core::Found>(&reply->outcome);
        SEMEL_ASSERT(found != nullptr, "a store answers Get with Found");
        co_return found->record;
    }

    Task<Result<Decided>> ask(core::Item item, core::TenantTag tenant) {
        const StoredKey key = item.key;
        std::uint32_t chunk = 0;
        if (const auto* wanted = std::get_if<core::GetChunk>(&item.operation)) chunk = wanted->n;
        if (auto* wanted = std::get_if<core::GetConversation>(&item.operation);
            wanted != nullptr && vault_ != nullptr && !wanted->request_id.empty()) {
            wanted->request_id = vault_->stored_id(key, wanted->request_id);
        }
        auto reply = co_await batcher_.call(std::move(item));
        if (!reply) {
            ++counters_.store_errors;
            co_return reply;
        }
        if (const auto* found = std::get_if<core::Found>(&reply->outcome)) {
            tenant = found->record && is_sealed(*found->record) ? found->record->tenant
                                                                : core::TenantTag{};
        } else if (!std::holds_alternative<core::ChunkFound>(reply->outcome) &&
                   !std::holds_alternative<core::TurnsFound>(reply->outcome)) {
            tenant = {};
        }
        DataKeyPtr data_key;
        if (keys_.sealed(tenant)) {
            data_key = keys_.ready(tenant);
            if (!data_key) {
                auto asked = co_await keys_.ask(tenant);
                if (!asked) co_return std::move(asked.error());
                data_key = std::move(*asked);
            }
        }
        open_found(key, chunk, reply->outcome, data_key.get());
        remember(key, reply->outcome, data_key.get());
        co_return reply;
    }

    Task<> stop() {
        stopping_ = true;
        loop_.cancel(tick_timer_);
        tick_timer_ = 0;
        stop_signal_.notify();
        const SteadyTime deadline = loop_.now() + stop_patience;
        while (background_ != 0 && loop_.now() < deadline) {
            const auto seen = background_ended_.version();
            if (background_ == 0) break;
            co_await background_ended_.wait(loop_, seen, deadline);
        }
    }

    RecordPtr find_hot(const StoredKey& key) {
        RecordPtr record = hot_.find(key, store_.now());
        if (!record || !keys_.sealed(record->tenant)) return record;
        keys_.look_in_time();
        return vault_->may_replay(loop_.now()) ? record : nullptr;
    }

    /// The store was out a moment ago, and a lease that looks dead may be one whose owner could not
    /// renew: it is not taken over yet. `refused` is not set where an acquire may decide.
    Task<Result<Acquired>> in_grace(const AcquireRequest& request) {
        core::Item item{request.key, core::Get{}};
        auto reply =
            co_await batcher_.call(std::move(item), loop_.now() + options_.acquire_patience);
        if (!reply) {
            ++counters_.store_errors;
            co_return unavailable("the store did not say whether this intent runs; " +
                                  reply.error().detail);
        }
        const auto* found = std::get_if<core::Found>(&reply->outcome);
        SEMEL_ASSERT(found != nullptr, "a store answers Get with Found");
        const RecordPtr& record = found->record;
        if (!record || record->status != core::Status::processing ||
            !record->fingerprint.matches(request.fingerprint))
            co_return Acquired{};
        const auto left =
            std::max<std::chrono::nanoseconds>(record->lease_end - reply->at, engine_.grace_left());
        if (left.count() <= 0) co_return Acquired{};
        core::StoreOutcome outcome =
            core::InFlight{.owner = record->owner,
                           .token = record->token,
                           .remaining = std::chrono::ceil<milliseconds>(left),
                           .created = record->created};
        count(outcome);
        co_return Acquired{nullptr, std::move(outcome), reply->at};
    }

    // ---------------------------------------------------------------- leases

    void hold(LeaseGuard& lease) {
        lease.id_ = ++last_lease_;
        lease.position_ = leases_.size();
        leases_.push_back(&lease);
        if (tick_timer_ == 0 && !stopping_) arm_tick();
    }

    /// Ends the renewal of a guard; harmless if it has ended.
    void settle_guard(LeaseGuard& lease) {
        if (lease.id_ == 0) return;
        if (lease.keeper_.asking()) renewing_.erase(lease.id_);
        leases_[lease.position_] = leases_.back();
        leases_[lease.position_]->position_ = lease.position_;
        leases_.pop_back();
        lease.id_ = 0;
    }

    [[nodiscard]] std::size_t leases() const { return leases_.size(); }

  private:
    /// An acquire that made a lost claim anew and got no reply: it may be executed until then.
    struct UnansweredClaim {
        Nonce nonce;
        StoreTime not_after;
    };
    /// An answer on its way into its record.
    struct Delivery {
        explicit Delivery(SpoolEntry e) : entry(std::move(e)) {}
        SpoolEntry entry;
        std::optional<core::FencingToken> spooled_as;  ///< Token under which the spool holds it.
        std::optional<UnansweredClaim> unanswered;
        DataKeyPtr data_key;  ///< Of this process's own answer; null for one that an earlier
                              ///< process spooled.
        std::shared_ptr<const std::string> plain;  ///< The body as it was before it was sealed.
        SteadyTime keep_at{};  ///< When the lease is renewed next while it waits in the spool.
    };
    /// The nonce under which a lost claim is made anew. A function of the lost one: whoever
    /// delivers the answer, now or in a later process, asks with the same, so that what a lost
    /// reply granted is granted again and not once more.
    static Nonce claim_nonce(const Nonce& lost) {
        std::string text(reinterpret_cast<const char*>(lost.bytes.data()), lost.bytes.size());
        const base::Digest digest = base::sha256(text += "claimed anew");
        Nonce nonce;
        std::memcpy(nonce.bytes.data(), digest.bytes.data(), nonce.bytes.size());
        return nonce;
    }

    // ---- background work

    void in_background(Task<> task) {
        ++background_;
        loop_.spawn(counted(std::move(task)));
    }
    Task<> counted(Task<> task) {
        co_await std::move(task);
        --background_;
        background_ended_.notify();
    }
    /// False: the engine stops.
    Task<bool> pause(milliseconds d) {
        if (stopping_) co_return false;
        const auto seen = stop_signal_.version();
        const bool stopped = co_await stop_signal_.wait(loop_, seen, loop_.now() + d);
        co_return !stopped && !stopping_;
    }

    /// Repeats release(key, nonce) until the store confirms it at a time past `not_after`: then no
    /// lease of this nonce lives and no acquire of it can be granted any more.
    Task<> settle(StoredKey key, Nonce nonce, StoreTime not_after) {
        Backoff backoff(background_backoff_first, background_backoff_max);
        for (;;) {
            core::Item item{key, core::Release{core::FencingToken{}, nonce}};
            auto reply =
                co_await batcher_.call(std::move(item), loop_.now() + options_.acquire_patience);
            milliseconds wait = backoff.next();
            if (reply) {
                if (reply->at > not_after) {
                    ++counters_.settled_acquires;
                    co_return;
                }
                wait = std::min(
                    wait, std::chrono::ceil<milliseconds>(not_after - reply->at) + milliseconds{1});
            } else {
                ++counters_.store_errors;
            }
            if (!co_await pause(wait)) co_return;
        }
    }

    /// Brings a spooled answer into its record, however long it takes.
    Task<> deliver(Delivery delivery) {
        if (!delivery.spooled_as) delivery.spooled_as = delivery.entry.complete.token;
        Backoff backoff(background_backoff_first, background_backoff_max);
        for (;;) {
            if (!spool_holds(delivery)) co_return;  // an acquire was faster
            const auto done = co_await try_record(delivery, std::nullopt);
            if (done) {
                delivered(delivery, *done);
                co_return;
            }
            co_await keep(delivery);
            if (!co_await pause(std::min(backoff.next(), options_.lease / 3))) co_return;
        }
    }

    /// Renews the lease of an answer that waits in the spool: a store that has no room for an answer
    /// may have some for the claim of a takeover, which would be paid for again.
    Task<> keep(Delivery& delivery) {
        delivery.keep_at = loop_.now() + options_.lease / 3;
        const core::Complete& complete = delivery.entry.complete;
        core::Item item{delivery.entry.key,
                        core::Renew{complete.token, complete.nonce, options_.lease}};
        const auto reply = co_await batcher_.call(std::move(item), delivery.keep_at);
        if (!reply) ++counters_.store_errors;
    }

    Task<> deliver_left_over(StoredKey key) {
        while (!stopping_) {
            auto entry = spool_.find(key);
            if (!entry) co_return;
            co_await deliver(Delivery(std::move(*entry)));
        }
    }

    /// Before an acquire: false if the store gave no answer.
    Task<bool> deliver_once(SpoolEntry entry) {
        Delivery delivery(std::move(entry));
        delivery.spooled_as = delivery.entry.complete.token;
        const auto done = co_await try_record(delivery, loop_.now() + options_.acquire_patience);
        if (!done) {
            // Not released now: the claim may have been granted, and the answer that it is for
            // still lies in the spool.
            if (delivery.unanswered) unanswered_claims_[delivery.entry.key] = *delivery.unanswered;
            co_return false;
        }
        delivered(delivery, *done);
        co_return true;
    }

    [[nodiscard]] bool spool_holds(const Delivery& delivery) {
        return spool_.holds(delivery.entry.key, *delivery.spooled_as);
    }

    void delivered(const Delivery& delivery, const Completion& completion) {
        if (!spool_holds(delivery)) return;
        ++(completion.kind == Completion::Kind::recorded ? counters_.spool_delivered
                                                         : counters_.spool_overtaken);
        spool_.remove(delivery.entry.key, *delivery.spooled_as);
        const auto unanswered = unanswered_claims_.find(delivery.entry.key);
        if (unanswered == unanswered_claims_.end()) return;
        in_background(
            settle(delivery.entry.key, unanswered->second.nonce, unanswered->second.not_after));
        unanswered_claims_.erase(unanswered);
    }

    // ---- recording an answer

    /// One try. Nullopt: no answer, try again. No deadline: nobody waits, and the chunks of a big
    /// answer may take long, as long as each of them is taken in time.
    Task<std::optional<Completion>> try_record(Delivery& delivery,
                                               std::optional<SteadyTime> deadline) {
        SpoolEntry& entry = delivery.entry;
        for (std::uint32_t n = 0; n < entry.chunks.size(); ++n) {
            if (!deadline && loop_.now() >= delivery.keep_at) co_await keep(delivery);
            core::Item chunk{entry.key, core::PutChunk{entry.complete.token, n, entry.chunks[n]}};
            const auto stored = co_await batcher_.call(std::move(chunk), step_end(deadline));
            if (!stored) {
                ++counters_.store_errors;
                co_return std::nullopt;
            }
        }
        core::Item item{entry.key, entry.complete};
        auto reply = co_await batcher_.call(std::move(item), step_end(deadline));
        if (!reply) {
            ++counters_.store_errors;
            co_return std::nullopt;
        }
        std::optional<Completion> done;
        if (auto* applied = std::get_if<core::Applied>(&reply->outcome)) {
            applied->record = as_it_was(delivery, std::move(applied->record));
            remember(entry.key, reply->outcome, delivery.data_key.get());
            done = Completion{Completion::Kind::recorded, applied->record};
        } else {
            auto* fenced = std::get_if<Fenced>(&reply->outcome);
            SEMEL_ASSERT(fenced != nullptr, "a store answers Complete with Applied or Fenced");
            const bool lost = fenced->record == nullptr ||
                              fenced->record->nonce == claim_nonce(entry.complete.nonce);
            if (lost) co_return co_await claim_anew(delivery, deadline);
            ++counters_.fenced;
            if (began_after(entry.complete.token, *fenced->record)) ++counters_.claim_lost;
            fenced->record = opened(entry.key, std::move(fenced->record), delivery.data_key.get());
            remember(entry.key, reply->outcome, delivery.data_key.get());
            done = Completion{Completion::Kind::overtaken, fenced->record};
        }
        settle_claim(delivery);
        co_return done;
    }

    /// The store lost the claim (a failover, a purge of an expired failure): acquires anew, so that
    /// the paid answer is kept. Nullopt: no answer yet, or granted and still to be recorded.
    Task<std::optional<Completion>> claim_anew(Delivery& delivery,
                                               std::optional<SteadyTime> deadline) {
        SpoolEntry& entry = delivery.entry;
        const Nonce nonce = claim_nonce(entry.complete.nonce);
        core::Acquire acquire{.fingerprint = entry.fingerprint,
                              .owner = options_.owner,
                              .nonce = nonce,
                              .lease = options_.lease,
                              .not_after = store_.now() + options_.acquire_patience,
                              .policy = entry.policy,
                              .starts_call = true,
                              .tenant = entry.tenant};
        const StoreTime not_after = acquire.not_after;
        core::Item item{entry.key, std::move(acquire)};
        auto reply = co_await batcher_.call(std::move(item), step_end(deadline));
        if (!reply) {
            ++counters_.store_errors;
            if (reply.error().applied != base::Applied::no)
                delivery.unanswered = UnansweredClaim{nonce, not_after};
            co_return std::nullopt;
        }
        if (std::holds_alternative<core::Late>(reply->outcome)) co_return std::nullopt;
        if (const auto* granted = std::get_if<core::Granted>(&reply->outcome)) {
            ++counters_.claim_lost;
            entry.complete.token = granted->token;
            co_await seal_anew(delivery);
            entry.complete.nonce = nonce;
            // Chunks lie under the old token and are gone with it: known to be completed is what
            // can still be said.
            if (entry.complete.answer.body_kind == core::BodyKind::chunks && entry.chunks.empty()) {
                entry.complete.answer.body_kind = core::BodyKind::not_kept;
                entry.complete.answer.chunk_count = 0;
                entry.complete.answer.body_digest = {};
                entry.complete.answer.sealed_under = 0;  // too much to keep, not erased
            }
            if (delivery.spooled_as) {
                if (auto kept = spool_.put(entry); !kept) ++counters_.store_errors;
                spool_.remove(entry.key, *delivery.spooled_as);
                delivery.spooled_as = granted->token;
            }
            co_return co_await try_record(delivery, deadline);
        }
        open_answered(entry.key, reply->outcome, delivery.data_key.get());
        remember(entry.key, reply->outcome, delivery.data_key.get());
        settle_claim(delivery);
        core::Item look{entry.key, core::Get{}};
        auto present = co_await batcher_.call(std::move(look), step_end(deadline));
        RecordPtr record;
        if (present) {
            if (auto* found = std::get_if<core::Found>(&present->outcome))
                record = opened(entry.key, std::move(found->record), delivery.data_key.get());
        }
        co_return Completion{Completion::Kind::overtaken, std::move(record)};
    }

    [[nodiscard]] SteadyTime step_end(std::optional<SteadyTime> deadline) const {
        return deadline.value_or(loop_.now() + options_.record_patience);
    }

    /// What lost the claim may have lost its tenant's key as well: it is put back, or, if there is
    /// another by now, the answer is sealed under that one.
    Task<> seal_anew(Delivery& delivery) {
        SpoolEntry& entry = delivery.entry;
        const DataKeyPtr old = delivery.data_key;
        if (!old || !keys_.sealed(entry.tenant)) co_return;
        co_await keys_.read_again(entry.tenant);
        auto asked = co_await keys_.ask(entry.tenant);
        if (!asked || (*asked)->id() == old->id()) co_return;
        delivery.data_key = std::move(*asked);
        core::Answer& answer = entry.complete.answer;
        if (answer.body_kind == core::BodyKind::inline_body && delivery.plain) {
            answer.body = delivery.plain;
            answer.body_digest = {};
            delivery.data_key->seal(entry.key, answer);
        }
        if (!entry.chunks.empty()) {
            base::Sha256 whole;
            for (std::uint32_t n = 0; n < entry.chunks.size(); ++n) {
                const auto plain = old->open(chunk_place(entry.key, n), entry.chunks[n]);
                SEMEL_ASSERT(plain, "what was sealed under a key is opened by it");
                whole.update(*plain);
                entry.chunks[n] = delivery.data_key->seal(chunk_place(entry.key, n), *plain);
            }
            answer.body_digest = whole.finish();
            delivery.data_key->seal(entry.key, answer);
        }
        if (auto& append = entry.complete.append) {
            std::string id = append->request_id;
            if (old->open(*append)) delivery.data_key->seal(*append, std::move(id));
        }
    }

    /// The work is decided: a copy of the acquire that is still unanswered must not leave a lease
    /// behind.
    void settle_claim(Delivery& delivery) {
        if (!delivery.unanswered) return;
        in_background(
            settle(delivery.entry.key, delivery.unanswered->nonce, delivery.unanswered->not_after));
        delivery.unanswered.reset();
    }

    // ---- renewals

    void arm_tick() {
        tick_timer_ =
            loop_.at(loop_.now() + options_.lease / core::LeaseKeeper::ticks_per_lease, [this] {
                tick_timer_ = 0;
                tick();
            });
    }

    void tick() {
        const SteadyTime now = loop_.now();
        for (LeaseGuard* lease : leases_) {
            if (lease->keeper_.step(now, core::LeaseTick{}) != core::LeaseAction::renew) continue;
            renewing_.emplace(lease->id_, lease);
            core::Item item{lease->key_,
                            core::Renew{lease->token(), lease->nonce_, options_.lease}};
            loop_.spawn(renew(lease->id_, std::move(item)));
        }
        if (!leases_.empty()) arm_tick();
    }

    Task<> renew(std::uint64_t id, core::Item item) {
        const SteadyTime deadline = loop_.now() + options_.lease / 3;
        auto reply = co_await batcher_.call(std::move(item), deadline);
        core::LeaseEvent event = core::LeaseUnanswered{};
        if (!reply) {
            ++counters_.store_errors;
        } else if (const auto* fenced = std::get_if<Fenced>(&reply->outcome)) {
            event = core::LeaseRefused{fenced->record};
        } else {
            ++counters_.renewals;
            event = core::LeaseRenewed{};
        }
        const auto found = renewing_.find(id);
        if (found == renewing_.end()) co_return;  // settled meanwhile
        LeaseGuard& lease = *found->second;
        renewing_.erase(found);
        if (lease.keeper_.step(loop_.now(), event) != core::LeaseAction::overtaken) co_return;
        ++counters_.leases_lost;
        const auto* refused = std::get_if<core::LeaseRefused>(&event);
        if (refused && refused->record && began_after(lease.token(), *refused->record))
            ++counters_.claim_lost;
        if (lease.on_overtaken) lease.on_overtaken();
    }

    // ---- small things

    /// A record that began after a grant does not follow it: the store forgot the claim, and
    /// somebody else was granted the key as a new one. (A token is at least the time of its grant.)
    static bool began_after(core::FencingToken token, const core::Record& record) {
        return record.created.us > static_cast<std::int64_t>(token.value);
    }

    [[nodiscard]] milliseconds usable_for() const {
        return std::min(options_.lease - options_.lease / margin_part, options_.acquire_patience);
    }

    /// Unique is enough: an unpredictable part per engine, and a counter.
    Nonce fresh_nonce() {
        Nonce nonce;
        const std::uint64_t count = ++last_nonce_;
        std::memcpy(nonce.bytes.data(), &nonce_base_, sizeof nonce_base_);
        std::memcpy(nonce.bytes.data() + sizeof nonce_base_, &count, sizeof count);
        return nonce;
    }

    static Error stopping() {
        return {.code = ErrorCode::stopping,
                .applied = base::Applied::no,
                .detail = "this process is shutting down"};
    }
    static Error unavailable(std::string detail) {
        return {.code = ErrorCode::store_unavailable,
                .applied = base::Applied::no,
                .retry_after = std::chrono::seconds{1},
                .detail = std::move(detail)};
    }

    void count(const core::StoreOutcome& outcome) {
        if (const auto* granted = std::get_if<core::Granted>(&outcome)) {
            ++counters_.granted;
            if (granted->kind == core::Granted::Kind::retry) ++counters_.retries;
            if (granted->kind == core::Granted::Kind::takeover) ++counters_.takeovers;
            if (granted->possible_second_payment) ++counters_.possible_second_payments;
        }
        if (std::holds_alternative<core::InFlight>(outcome)) ++counters_.in_flight;
        if (std::holds_alternative<core::Replay>(outcome)) ++counters_.replays;
        if (std::holds_alternative<core::Mismatch>(outcome)) ++counters_.mismatches;
        if (std::holds_alternative<core::UnknownOutcome>(outcome)) ++counters_.unknown_outcomes;
        if (std::holds_alternative<core::Exhausted>(outcome)) ++counters_.exhausted;
    }

    /// The record of an answer that was just recorded, without deciphering what is at hand.
    static RecordPtr as_it_was(const Delivery& delivery, RecordPtr record) {
        // Repeated by a later process after an erasure, it may hold another's.
        const bool ours = record->answer && record->answer->sealed_under ==
                                                delivery.entry.complete.answer.sealed_under;
        return opened(delivery.entry.key, std::move(record), delivery.data_key.get(),
                      ours ? delivery.plain : nullptr);
    }

    /// Keeps a completed record that an outcome carries, opened, for the next replay.
    void remember(const StoredKey& key, const core::StoreOutcome& outcome,
                  const DataKey* data_key) {
        RecordPtr record;
        if (const auto* applied = std::get_if<core::Applied>(&outcome)) record = applied->record;
        if (const auto* fenced = std::get_if<Fenced>(&outcome)) record = fenced->record;
        if (const auto* replay = std::get_if<core::Replay>(&outcome)) record = replay->record;
        if (const auto* found = std::get_if<core::Found>(&outcome)) record = found->record;
        if (!record || record->status != core::Status::completed || !record->answer) return;
        if (record->answer->sealed_under != 0) return;
        hot_.put(key, std::move(record));
        // An erasure that was noticed meanwhile has forgotten the key first and the records then.
        if (data_key != nullptr && !vault_->is_current(data_key->tenant(), data_key->id()))
            hot_.erase(key);
    }

    /// The store's clock minus ours lies between `at - answered` and `at - sent`. If two batches'
    /// spans lie further apart than a lease less one renewal, the store's clock jumped so far that
    /// a renewed lease may have been taken over.
    void watch_clock(StoreTime at, SteadyTime sent, SteadyTime answered) {
        const auto us = [](SteadyTime t) {
            return std::chrono::duration_cast<std::chrono::microseconds>(t.time_since_epoch())
                .count();
        };
        const std::int64_t low = at.us - us(answered);
        const std::int64_t high = at.us - us(sent);
        const std::int64_t limit =
            std::chrono::microseconds(options_.lease - options_.lease / 3).count();
        if (clock_seen_ && (low > clock_high_ + limit || high < clock_low_ - limit))
            ++counters_.clock_jumps;
        clock_seen_ = true;
        clock_low_ = low;
        clock_high_ = high;
    }

    Engine& engine_;
    Loop& loop_;
    core::Store& store_;
    const EngineOptions& options_;
    EngineCounters& counters_;
    HotRecords& hot_;
    Spool& spool_;
    Vault* vault_;
    Batcher batcher_;
    TenantKeys keys_;
    std::vector<LeaseGuard*> leases_;
    std::unordered_map<std::uint64_t, LeaseGuard*> renewing_;
    std::map<StoredKey, UnansweredClaim>
        unanswered_claims_;  ///< Of answers that are still spooled.
    std::uint64_t last_lease_ = 0;
    runtime::TimerId tick_timer_ = 0;
    std::uint64_t nonce_base_ = 0;
    std::uint64_t last_nonce_ = 0;
    bool stopping_ = false;
    std::size_t background_ = 0;
    runtime::Signal stop_signal_;
    runtime::Signal background_ended_;
    bool clock_seen_ = false;
    std::int64_t clock_low_ = 0;  ///< Bounds of the store's clock minus ours, in us.
    std::int64_t clock_high_ = 0;
};

// -------------------------------------------------------------------- LeaseGuard

LeaseGuard::LeaseGuard(Engine& engine, StoredKey key, core::Granted granted, core::Nonce nonce,
                       SteadyTime asked_at, core::Fingerprint fingerprint, core::Policy policy)
    : engine_(engine),
      key_(key),
      granted_(granted),
      nonce_(nonce),
      fingerprint_(std::move(fingerprint)),
      policy_(policy),
      keeper_(asked_at, engine.options().lease, granted.token, nonce) {
    engine_.impl_->hold(*this);
}

LeaseGuard::~LeaseGuard() {
    if (id_ != 0) engine_.impl_->settle_guard(*this);
}

// -------------------------------------------------------------------- Engine

Engine::Engine(Loop& loop, core::Store& store, EngineOptions options, HotRecords& hot, Spool& spool,
               EngineCounters& counters, Vault* vault)
    : loop_(loop), store_(store), options_(std::move(options)), counters_(counters) {
    SEMEL_ASSERT(options_.acquire_patience < options_.lease,
                 "a grant must reach its owner before its lease can be over");
    impl_ = std::make_unique<Impl>(*this, hot, spool, vault);
}
Engine::~Engine() = default;

Task<Result<Engine::Acquired>> Engine::acquire(AcquireRequest request) {
    return impl_->acquire(std::move(request));
}
Task<Result<bool>> Engine::start(LeaseGuard& lease) { return impl_->start(lease); }
Task<Result<void>> Engine::put_chunk(LeaseGuard& lease, std::uint32_t n, std::string bytes,
                                     std::optional<SteadyTime> until) {
    return impl_->put_chunk(lease, n, std::move(bytes), until);
}
Task<Completion> Engine::complete(LeaseGuard& lease, core::Answer answer, core::Usage usage,
                                  std::optional<core::Append> append,
                                  std::vector<std::string> unwritten,
                                  std::optional<SteadyTime> until) {
    return impl_->complete(lease, std::move(answer), std::move(usage), std::move(append),
                           std::move(unwritten), until);
}
Task<core::RecordPtr> Engine::fail(LeaseGuard& lease, core::Fail failure) {
    return impl_->fail(lease, std::move(failure));
}
Task<> Engine::release(LeaseGuard& lease) { return impl_->release(lease); }
Task<Result<core::RecordPtr>> Engine::get(StoredKey key) { return impl_->get(key); }
core::RecordPtr Engine::find_hot(const StoredKey& key) const { return impl_->find_hot(key); }
Task<Result<core::Decided>> Engine::ask(core::Item item, core::TenantTag tenant) {
    return impl_->ask(std::move(item), tenant);
}
std::chrono::nanoseconds Engine::grace_left() const {
    const SteadyTime until = store_.answering_since() + options_.lease / 3;
    const SteadyTime now = loop_.now();
    return now < until ? until - now : std::chrono::nanoseconds{0};
}
StoreTime Engine::store_now() const { return store_.now(); }
std::size_t Engine::leases() const { return impl_->leases(); }
Task<> Engine::stop() { return impl_->stop(); }

}  // namespace semel::engine
