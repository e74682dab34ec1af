// How an answer that was paid for comes into its record: at once, or from the spool.
#include <cstring>

#include "base/fault_point.hpp"
#include "base/hash.hpp"
#include "engine/engine_impl.hpp"

namespace semel::engine {

namespace {

/// Between two tries of a client that waits.
constexpr milliseconds foreground_backoff_first{10};
constexpr milliseconds foreground_backoff_max{200};

Place chunk_place(const StoredKey& key, std::uint32_t n) {
    return {.kind = Place::Kind::chunk, .of = key, .n = n};
}

}  // namespace

Task<Result<void>> Engine::Impl::put_chunk(LeaseGuard& lease, std::uint32_t n, std::string bytes,
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

Task<Completion> Engine::Impl::complete(LeaseGuard& lease, core::Answer answer, core::Usage usage,
                                        std::optional<core::Append> append,
                                        std::vector<std::string> unwritten,
                                        std::optional<SteadyTime> until) {
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
                   .complete = {lease.token(), lease.nonce_, std::move(answer), std::move(usage),
                                std::move(append)},
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

Task<RecordPtr> Engine::Impl::fail(LeaseGuard& lease, core::Fail failure) {
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

Nonce Engine::Impl::claim_nonce(const Nonce& lost) {
    std::string text(reinterpret_cast<const char*>(lost.bytes.data()), lost.bytes.size());
    const base::Digest digest = base::sha256(text += "claimed anew");
    Nonce nonce;
    std::memcpy(nonce.bytes.data(), digest.bytes.data(), nonce.bytes.size());
    return nonce;
}

Task<> Engine::Impl::deliver(Delivery delivery) {
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

Task<> Engine::Impl::keep(Delivery& delivery) {
    delivery.keep_at = loop_.now() + options_.lease / 3;
    const core::Complete& complete = delivery.entry.complete;
    core::Item item{delivery.entry.key,
                    core::Renew{complete.token, complete.nonce, options_.lease}};
    const auto reply = co_await batcher_.call(std::move(item), delivery.keep_at);
    if (!reply) ++counters_.store_errors;
}

Task<> Engine::Impl::deliver_left_over(StoredKey key) {
    while (!stopping_) {
        auto entry = spool_.find(key);
        if (!entry) co_return;
        co_await deliver(Delivery(std::move(*entry)));
    }
}

Task<bool> Engine::Impl::deliver_once(SpoolEntry entry) {
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

void Engine::Impl::delivered(const Delivery& delivery, const Completion& completion) {
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

Task<std::optional<Completion>> Engine::Impl::try_record(Delivery& delivery,
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
        const bool lost =
            fenced->record == nullptr || fenced->record->nonce == claim_nonce(entry.complete.nonce);
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

Task<std::optional<Completion>> Engine::Impl::claim_anew(Delivery& delivery,
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

Task<> Engine::Impl::seal_anew(Delivery& delivery) {
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

void Engine::Impl::settle_claim(Delivery& delivery) {
    if (!delivery.unanswered) return;
    in_background(
        settle(delivery.entry.key, delivery.unanswered->nonce, delivery.unanswered->not_after));
    delivery.unanswered.reset();
}

RecordPtr Engine::Impl::as_it_was(const Delivery& delivery, RecordPtr record) {
    // Repeated by a later process after an erasure, it may hold another's.
    const bool ours = record->answer &&
                      record->answer->sealed_under == delivery.entry.complete.answer.sealed_under;
    return opened(delivery.entry.key, std::move(record), delivery.data_key.get(),
                  ours ? delivery.plain : nullptr);
}

}  // namespace semel::engine
