#include "engine/engine.hpp"

#include <cstring>

#include "base/fault_point.hpp"
#include "base/hash.hpp"
#include "engine/engine_impl.hpp"

namespace semel::engine {

namespace {

/// An acquire that came after its not_after (the store's clock is ahead of what we knew) is asked
/// again this often.
constexpr int late_acquires_max = 3;
/// How long stop() waits for what runs in the background.
constexpr milliseconds stop_patience{1000};

}  // namespace

Engine::Impl::Impl(Engine& engine, HotRecords& hot, Spool& spool, Vault* vault)
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

Engine::Impl::~Impl() {
    loop_.cancel(tick_timer_);
    // Guards may outlive the engine inside coroutines that the loop destroys later.
    for (LeaseGuard* lease : leases_) lease->id_ = 0;
}

Task<Result<Engine::Acquired>> Engine::Impl::acquire(AcquireRequest request) {
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
        auto reply = co_await batcher_.call(std::move(item), asked_at + options_.acquire_patience);
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
            co_return unavailable("the store's grant came too late to be used and is given back");
        }
        auto lease = std::make_unique<LeaseGuard>(engine_, request.key, *granted, nonce, asked_at,
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

Task<Result<Engine::Acquired>> Engine::Impl::in_grace(const AcquireRequest& request) {
    core::Item item{request.key, core::Get{}};
    auto reply = co_await batcher_.call(std::move(item), loop_.now() + options_.acquire_patience);
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
    core::StoreOutcome outcome = core::InFlight{.owner = record->owner,
                                                .token = record->token,
                                                .remaining = std::chrono::ceil<milliseconds>(left),
                                                .created = record->created};
    count(outcome);
    co_return Acquired{nullptr, std::move(outcome), reply->at};
}

Task<Result<bool>> Engine::Impl::start(LeaseGuard& lease) {
    core::Item item{lease.key_, core::Start{lease.token(), lease.nonce_}};
    auto reply = co_await batcher_.call(std::move(item), loop_.now() + options_.acquire_patience);
    if (!reply) {
        ++counters_.store_errors;
        co_return std::move(reply.error());
    }
    if (std::holds_alternative<core::Applied>(reply->outcome)) co_return true;
    ++counters_.fenced;
    co_return false;
}

Task<> Engine::Impl::release(LeaseGuard& lease) {
    core::Item item{lease.key_, core::Release{lease.token(), lease.nonce_}};
    auto reply = co_await batcher_.call(std::move(item), loop_.now() + options_.record_patience);
    settle_guard(lease);
    if (reply) co_return;
    ++counters_.store_errors;
    in_background(settle(lease.key_, lease.nonce_, StoreTime{}));
}

Task<Result<RecordPtr>> Engine::Impl::get(StoredKey key) {
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

Task<Result<Decided>> Engine::Impl::ask(core::Item item, core::TenantTag tenant) {
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
        tenant =
            found->record && is_sealed(*found->record) ? found->record->tenant : core::TenantTag{};
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

RecordPtr Engine::Impl::find_hot(const StoredKey& key) {
    RecordPtr record = hot_.find(key, store_.now());
    if (!record || !keys_.sealed(record->tenant)) return record;
    keys_.look_in_time();
    return vault_->may_replay(loop_.now()) ? record : nullptr;
}

Task<> Engine::Impl::stop() {
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

Nonce Engine::Impl::fresh_nonce() {
    Nonce nonce;
    const std::uint64_t count = ++last_nonce_;
    std::memcpy(nonce.bytes.data(), &nonce_base_, sizeof nonce_base_);
    std::memcpy(nonce.bytes.data() + sizeof nonce_base_, &count, sizeof count);
    return nonce;
}

void Engine::Impl::count(const core::StoreOutcome& outcome) {
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

void Engine::Impl::remember(const StoredKey& key, const core::StoreOutcome& outcome,
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

void Engine::Impl::watch_clock(StoreTime at, SteadyTime sent, SteadyTime answered) {
    const auto us = [](SteadyTime t) {
        return std::chrono::duration_cast<std::chrono::microseconds>(t.time_since_epoch()).count();
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

void Engine::Impl::in_background(Task<> task) {
    ++background_;
    loop_.spawn(counted(std::move(task)));
}

Task<> Engine::Impl::counted(Task<> task) {
    co_await std::move(task);
    --background_;
    background_ended_.notify();
}

Task<bool> Engine::Impl::pause(milliseconds d) {
    if (stopping_) co_return false;
    const auto seen = stop_signal_.version();
    const bool stopped = co_await stop_signal_.wait(loop_, seen, loop_.now() + d);
    co_return !stopped && !stopping_;
}

Task<> Engine::Impl::settle(StoredKey key, Nonce nonce, StoreTime not_after) {
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
