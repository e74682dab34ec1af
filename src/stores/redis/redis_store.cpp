// Batches of operations become pipelines of commands. Most items need one round trip; the few that
// need two (a lost reply that is read back, a record that is looked at first, a second item on the
// same key) are asked again when the first round is in.
#include "stores/redis/redis_store.hpp"

#include <algorithm>
#include <atomic>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "core/known_completed.hpp"
#include "core/parking.hpp"
#include "core/transition.hpp"
#include "stores/redis/checks.hpp"
#include "stores/redis/client.hpp"
#include "stores/redis/layout.hpp"
#include "stores/redis/listing.hpp"
#include "stores/redis/operations.hpp"
#include "stores/redis/scripts.hpp"

namespace semel::stores {
namespace {

using namespace core;
namespace redis = semel::stores::redis;

base::Error stopping() {
    return {.code = base::ErrorCode::stopping,
            .detail = "redis: the store is stopped; nothing was done"};
}

base::Error failed(const redis::NoReply& none) {
    return {.code = none.full ? base::ErrorCode::store_full : base::ErrorCode::store_unavailable,
            .applied = none.applied,
            .retry_after = std::chrono::seconds{1},
            .detail = "redis: " + none.detail};
}

/// One script run decides at most so much: other clients of the server wait meanwhile.
constexpr std::size_t script_items_max = 64;
constexpr std::size_t script_bytes_max = 1U << 20;
/// Parking needs no decision.
constexpr std::size_t parked_items_max = 256;

/// Of a record, besides the question that it holds: header, fingerprint, field marks, owner, label.
constexpr std::size_t record_overhead_max = 16U << 10;

base::Error too_long(std::uint64_t argument_max_bytes) {
    return {.code = base::ErrorCode::store_unavailable,
            .retry_after = std::chrono::seconds{1},
            .detail =
                "redis: what is to be stored is longer than what the server takes in one piece (" +
                std::to_string(argument_max_bytes) +
                " bytes): raise its proto-max-bulk-len; nothing was done"};
}

class RedisStore final : public Store {
  public:
    RedisStore(RedisOptions options, std::unique_ptr<redis::Client> client, Durability durability,
               std::uint64_t argument_max_bytes)
        : options_(std::move(options)),
          names_(options_.prefix),
          client_(std::move(client)),
          listing_(*client_, names_, options_.time),
          durability_(std::move(durability)),
          argument_max_bytes_(argument_max_bytes) {}
    ~RedisStore() override { client_->stop(); }

    void submit(std::vector<Item> items, BatchDone done) override {
        if (stopped_.load()) {
            BatchResults refused;
            refused.reserve(items.size());
            for (std::size_t i = 0; i < items.size(); ++i) refused.emplace_back(stopping());
            done(std::move(refused));
            return;
        }
        auto batch = std::make_shared<Batch>(*this, std::move(items), std::move(done));
        batch->begin();
    }

    base::Result<ScanPage> scan(const ScanFilter& filter, const std::string& cursor,
                                std::size_t limit) override {
        if (stopped_.load()) return stopping();
        return listing_.scan(filter, cursor, limit);
    }
    base::Result<std::size_t> purge(std::size_t limit) override {
        if (stopped_.load()) return stopping();
        return listing_.purge(limit);
    }
    [[nodiscard]] StoreTime now() const override {
        if (options_.time) return options_.time();
        const auto steady = std::chrono::duration_cast<std::chrono::microseconds>(
            base::system_clocks().steady().time_since_epoch());
        return {steady.count() + client_->clock_offset_us()};
    }
    [[nodiscard]] base::SteadyTime answering_since() const override {
        // While its memory is full it answers, but no owner can renew.
        return std::max(client_->answering_since(),
                        base::SteadyTime{base::SteadyTime::duration{full_at_.load()}});
    }
    [[nodiscard]] Durability durability() const override { return durability_; }
    base::Result<void> health() override {
        if (stopped_.load()) return stopping();
        return client_->health();
    }
    void stop() override {
        stopped_.store(true);
        client_->stop();
    }

  private:
    /// What is asked for an item in this round.
    enum class Step : std::uint8_t {
        ask,         ///< The operation itself.
        look_first,  ///< Acquire of a key known to be completed: its record.
        look_full,   ///< Acquire or ClaimValue that the server refused because its memory is full:
                     ///< what it holds may say that nothing is to be written.
        read_back,   ///< Acquire whose reply was lost: its record.
        see_turn,    ///< Resolve: the record, whose turn names the conversation.
        see_fence,   ///< OpenParking: who owns the list, and is to own it no longer.
    };
    struct Todo {
        std::size_t item;
        Step step;
        bool alone = false;  ///< Shares its script with no other item.
    };

    /// One submitted batch until all of its items are answered. Holds itself.
    class Batch : public std::enable_shared_from_this<Batch> {
      public:
        Batch(RedisStore& store, std::vector<Item> items, BatchDone done)
            : store_(store), items_(std::move(items)), done_(std::move(done)) {
            // Each is overwritten; a text would be allocated for nothing.
            results_.assign(items_.size(), base::Error{.code = base::ErrorCode::stopping});
        }

        void begin() {
            todo_.reserve(items_.size());
            for (std::size_t i = 0; i < items_.size(); ++i) {
                Step step = Step::ask;
                if (const auto* acquire = std::get_if<Acquire>(&items_[i].operation)) {
                    if (acquire->turn && acquire->turn->user_content.size() + record_overhead_max >
                                             store_.argument_max_bytes_) {
                        results_[i] = too_long(store_.argument_max_bytes_);
                        continue;
                    }
                    if (store_.known_completed_.holds(items_[i].key)) step = Step::look_first;
                } else if (std::holds_alternative<Resolve>(items_[i].operation)) {
                    step = Step::see_turn;
                } else if (std::holds_alternative<OpenParking>(items_[i].operation)) {
                    step = Step::see_fence;
                } else if (const auto* park = std::get_if<Park>(&items_[i].operation);
                           park != nullptr && park->bytes.size() > store_.argument_max_bytes_) {
                    results_[i] = too_long(store_.argument_max_bytes_);
                    continue;
                }
                todo_.push_back({i, step});
            }
            if (todo_.empty()) return done_(std::move(results_));
            round();
        }

      private:
        static constexpr std::size_t none = static_cast<std::size_t>(-1);
        /// Where the answer to an item of this round will be.
        struct Asked {
            Todo todo;
            std::size_t command = none;
            std::size_t element = none;  ///< Of the script's reply; none: a plain command.
            std::size_t time_command =
                none;  ///< The command before it that tells the time of a plain read.
        };
        /// Runs of the script for one slot, while they are put together. What must not be sent
        /// twice is kept apart.
        struct Scripts {
            std::optional<redis::ScriptBatch> grants;
            std::optional<redis::ScriptBatch> others;
            std::vector<std::size_t> asked_of_grants;  ///< In asked_.
            std::vector<std::size_t> asked_of_others;
        };

        /// What the items of a round before this one touch.
        class Touched {
          public:
            /// Whether the item must wait for one of those; it is one of them from now on.
            bool before(const Item& item) {
                const ParkingPart part = parking_part(item.operation);
                if (part == ParkingPart::none) return !keys_.insert(item.key).second;
                if (part == ParkingPart::whole) {
                    const bool again = !wholes_.insert(item.key).second;
                    return again || parts_.contains(item.key);
                }
                parts_.insert(item.key);
                const bool again = !places_.insert(touched_by(item.key, item.operation)).second;
                return again || wholes_.contains(item.key);
            }

          private:
            std::unordered_set<StoredKey, base::DigestHash> keys_;
            std::unordered_set<StoredKey, base::DigestHash> wholes_;  ///< Lists of parked messages,
            std::unordered_set<StoredKey, base::DigestHash> parts_;   ///< those that a place is of,
            std::unordered_set<StoredKey, base::DigestHash> places_;  ///< and the places.
        };
        /// The command that parks in a list or takes out of it, while items are added to it.
        struct ParkingRun {
            std::size_t command = none;
            std::size_t time_command = none;
            std::size_t items = 0;
        };
        using ParkingRuns = std::map<std::pair<StoredKey, std::optional<Nonce>>, ParkingRun>;

        void round() {
            const std::string time =
                store_.options_.time ? std::to_string(store_.options_.time().us) : std::string{};
            std::vector<redis::Command> commands;
            std::vector<Todo> later;
            Touched touched;
            ParkingRuns runs;
            std::map<std::uint16_t, Scripts> by_slot;
            std::size_t time_command = none;
            asked_.reserve(todo_.size());
            const auto finish = [&](std::optional<redis::ScriptBatch>& batch,
                                    std::vector<std::size_t>& asked, bool repeatable) {
                if (!batch) return;
                for (std::size_t element = 0; element < asked.size(); ++element) {
                    asked_[asked[element]].command = commands.size();
                    asked_[asked[element]].element = element;
                }
                commands.push_back(batch->take(time, repeatable));
                batch.reset();
                asked.clear();
            };
            for (const Todo& todo : todo_) {
                const Item& item = items_[todo.item];
                // Items on one key are decided one after the other, also if one must be sent again.
                if (todo_.size() > 1 && touched.before(item)) {
                    later.push_back(todo);
                    continue;
                }
                const std::uint16_t slot = store_.names_.slot(bucket_of(item.key));
                if (todo.step == Step::ask && redis::decided_by_script(item.operation)) {
                    Scripts& scripts = by_slot[store_.options_.cluster ? slot : 0];
                    const bool grants = std::holds_alternative<Acquire>(item.operation) ||
                                        std::holds_alternative<Resolve>(item.operation);
                    auto& batch = grants ? scripts.grants : scripts.others;
                    auto& asked = grants ? scripts.asked_of_grants : scripts.asked_of_others;
                    if (todo.alone) finish(batch, asked, !grants);
                    if (!batch) batch.emplace(store_.names_, slot, store_.argument_max_bytes_);
                    asked.push_back(asked_.size());
                    asked_.push_back({.todo = todo});
                    batch->add(item, seen(todo.item));
                    if (todo.alone || batch->items() == script_items_max ||
                        batch->bytes() >= script_bytes_max)
                        finish(batch, asked, !grants);
                    continue;
                }
                ParkingRun* run = nullptr;
                if (parking_part(item.operation) == ParkingPart::place) {
                    const auto* park = std::get_if<Park>(&item.operation);
                    run = &runs[{item.key, park ? std::optional(park->fence) : std::nullopt}];
                    if (run->command != none && run->items < parked_items_max &&
                        commands[run->command].wire.size() < script_bytes_max) {
                        redis::add_to_parking(commands[run->command], item.operation);
                        ++run->items;
                        asked_.push_back({.todo = todo,
                                          .command = run->command,
                                          .time_command = run->time_command});
                        continue;
                    }
                }
                if (!store_.options_.time && (time_command == none || store_.options_.cluster)) {
                    // The time before the read, from the same server: what had expired by then had
                    // expired.
                    time_command = commands.size();
                    commands.push_back(time_of(slot));
                }
                asked_.push_back(
                    {.todo = todo, .command = commands.size(), .time_command = time_command});
                if (run != nullptr) *run = {commands.size(), time_command, 1};
                commands.push_back(plain_command(todo));
            }
            for (auto& [slot, scripts] : by_slot) {
                finish(scripts.grants, scripts.asked_of_grants, false);
                finish(scripts.others, scripts.asked_of_others, true);
            }
            todo_ = std::move(later);
            store_.client_->submit(std::move(commands), [self = this->shared_from_this()](
                                                            std::vector<redis::Answer> answers) {
                self->answered(answers);
            });
        }

        [[nodiscard]] redis::Command plain_command(const Todo& todo) const {
            const Item& item = items_[todo.item];
            const redis::Names& names = store_.names_;
            const auto* open = std::get_if<OpenParking>(&item.operation);
            if (todo.step == Step::see_fence) return redis::get_fence(item.key, names);
            if (open != nullptr)
                return redis::open_parking(item.key, *open, fences_.at(todo.item), names);
            if (todo.step == Step::ask) return redis::command_of(item, names);
            const auto* value = std::get_if<ClaimValue>(&item.operation);
            if (value != nullptr) return redis::get_value(value->name, names);
            return redis::get_record(item.key, names);
        }

        [[nodiscard]] RecordPtr seen(std::size_t item) const {
            const auto found = seen_.find(item);
            return found == seen_.end() ? nullptr : found->second;
        }

        static redis::Command time_of(std::uint16_t slot) {
            redis::Command command;
            redis::append_argument(command.wire, "TIME");
            command.arguments = 1;
            command.slot = slot;
            command.writes = false;
            command.repeatable = true;
            return command;
        }

        void answered(std::vector<redis::Answer>& answers) {
            std::vector<Todo> again;
            for (const Asked& asked : asked_) {
                const redis::Answer& answer = answers[asked.command];
                base::Result<Decided>& result = results_[asked.todo.item];
                std::optional<Todo> next;
                if (const auto* nothing = std::get_if<redis::NoReply>(&answer)) {
                    next = not_answered(asked, *nothing, result);
                } else if (asked.element != none) {
                    take_decision(asked, std::get<redis::Reply>(answer), result);
                } else if (auto read_at = time_of(asked, answers); !read_at) {
                    result = read_at.error();
                } else {
                    next = take_read(asked.todo, std::get<redis::Reply>(answer), *read_at, result);
                }
                if (next) again.push_back(*next);
            }
            asked_.clear();
            // What is asked again keeps its place before what waited for it.
            again.insert(again.end(), todo_.begin(), todo_.end());
            todo_ = std::move(again);
            if (todo_.empty()) {
                done_(std::move(results_));
            } else {
                round();
            }
        }

        [[nodiscard]] base::Result<StoreTime> time_of(
            const Asked& asked, const std::vector<redis::Answer>& answers) const {
            if (asked.time_command == none) return store_.options_.time();
            const redis::Answer& told = answers[asked.time_command];
            if (const auto* nothing = std::get_if<redis::NoReply>(&told)) return failed(*nothing);
            return redis::time_in(std::get<redis::Reply>(told));
        }

        std::optional<Todo> not_answered(const Asked& asked, const redis::NoReply& nothing,
                                         base::Result<Decided>& result) {
            // The error that led to it stays.
            if (asked.todo.step == Step::read_back || asked.todo.step == Step::look_full)
                return std::nullopt;
            if (nothing.unconfirmed != nullptr &&
                changed_nothing(asked, *nothing.unconfirmed, result))
                return std::nullopt;
            result = failed(nothing);
            if (nothing.full) {
                store_.full_at_.store(base::system_clocks().steady().time_since_epoch().count());
            }
            if (nothing.full &&
                std::holds_alternative<ClaimValue>(items_[asked.todo.item].operation))
                return Todo{asked.todo.item, Step::look_full};
            if (asked.element == none) return std::nullopt;
            // Memory is full: the first write of the script was refused and nothing done.
            if (nothing.full && std::holds_alternative<Acquire>(items_[asked.todo.item].operation))
                return Todo{asked.todo.item, Step::look_full};
            if (nothing.full && !asked.todo.alone) return Todo{asked.todo.item, Step::ask, true};
            // Asked again it could be granted twice, the second time to nobody. Read, it tells
            // whether it was granted.
            // With wait_replicas it would still not tell whether the replicas have it.
            const bool lost_acquire =
                nothing.applied != base::Applied::no && store_.options_.wait_replicas == 0 &&
                std::holds_alternative<Acquire>(items_[asked.todo.item].operation);
            if (lost_acquire) return Todo{asked.todo.item, Step::read_back};
            return std::nullopt;
        }

        /// Whether the reply that replicas did not confirm, to an acquire, of parking or for a
        /// value, tells of what was there before: then there was nothing to confirm. `result` has
        /// it.
        bool changed_nothing(const Asked& asked, const redis::Reply& reply,
                             base::Result<Decided>& result) {
            const Item& item = items_[asked.todo.item];
            if (std::holds_alternative<ClaimValue>(item.operation)) {
                if (reply.kind != redis::Reply::Kind::string) return false;
                result = Decided{Value{reply.text}, store_.now()};
                return true;
            }
            if (std::holds_alternative<Park>(item.operation)) {
                result = redis::outcome_of(item, reply, store_.now());
                return result && std::holds_alternative<ParkingLost>(result->outcome);
            }
            if (!std::holds_alternative<Acquire>(item.operation)) return false;
            take_decision(asked, reply, result);
            return result && (std::holds_alternative<Replay>(result->outcome) ||
                              std::holds_alternative<InFlight>(result->outcome) ||
                              std::holds_alternative<Mismatch>(result->outcome));
        }

        void take_decision(const Asked& asked, const redis::Reply& reply,
                           base::Result<Decided>& result) {
            const Item& item = items_[asked.todo.item];
            if (reply.elements.size() <= asked.element) {
                result = base::Error{
                    .code = base::ErrorCode::store_corrupt,
                    .applied = base::Applied::unknown,
                    .detail = "redis: a script's reply is shorter than what it was asked"};
                return;
            }
            result = redis::decided(item, reply.elements[asked.element]);
            if (result) note_completed(item.key, result->outcome);
        }

        /// The reply to a plain command. A step if the item needs one more.
        std::optional<Todo> take_read(const Todo& todo, const redis::Reply& reply,
                                      StoreTime read_at, base::Result<Decided>& result) {
            const Item& item = items_[todo.item];
            if (std::holds_alternative<OpenParking>(item.operation))
                return take_over(todo, reply, read_at, result);
            if (todo.step == Step::ask) {
                result = redis::outcome_of(item, reply, read_at);
                if (result) note_completed(item.key, result->outcome);
                return std::nullopt;
            }
            if (todo.step == Step::read_back) {
                read_back(item, reply, read_at, result);
                return std::nullopt;
            }
            if (std::holds_alternative<ClaimValue>(item.operation)) {
                if (reply.kind == redis::Reply::Kind::string)
                    result = Decided{Value{reply.text}, read_at};
                return std::nullopt;
            }
            auto record = redis::record_of(reply);
            if (!record) {
                result = record.error();
                return std::nullopt;
            }
            if (todo.step == Step::look_first || todo.step == Step::look_full) {
                const bool settled = todo.step == Step::look_full ||
                                     (*record && (*record)->status == Status::completed);
                if (settled && decided_without_write(item, *record, read_at, result))
                    return std::nullopt;
                if (todo.step == Step::look_full) return std::nullopt;  // it stays refused
                store_.known_completed_.forget(item.key);
            }
            if (todo.step == Step::see_turn) seen_[todo.item] = std::move(*record);
            return Todo{todo.item, Step::ask};
        }

        std::optional<Todo> take_over(const Todo& todo, const redis::Reply& reply, StoreTime at,
                                      base::Result<Decided>& result) {
            if (todo.step == Step::see_fence) {
                auto fence = redis::fence_of(reply);
                if (fence) {
                    fences_[todo.item] = std::move(*fence);
                    return Todo{todo.item, Step::ask};
                }
                result = fence.error();
                return std::nullopt;
            }
            const auto opened = redis::parking_opened(reply);
            if (opened && !*opened) return Todo{todo.item, Step::see_fence};
            if (opened) {
                result = Decided{ParkingOpened{}, at};
            } else {
                result = opened.error();
            }
            return std::nullopt;
        }

        /// Whether an acquire changes nothing about this record, so that reading it was all of the
        /// step.
        static bool decided_without_write(const Item& item, const RecordPtr& record,
                                          StoreTime read_at, base::Result<Decided>& result) {
            Operation acquire = std::get<Acquire>(item.operation);
            Transition transition = decide(record, std::move(acquire), read_at);
            if (transition.write != Transition::Write::none) return false;
            result =
                Decided{std::visit([](auto& outcome) -> StoreOutcome { return std::move(outcome); },
                                   transition.outcome),
                        read_at};
            return true;
        }

        /// `result` holds the error of the lost reply, and keeps it unless the grant is found.
        static void read_back(const Item& item, const redis::Reply& reply, StoreTime read_at,
                              base::Result<Decided>& result) {
            const auto read = redis::record_of(reply);
            if (!read || !*read) return;
            const Record& record = **read;
            if (record.status != Status::processing ||
                record.nonce != std::get<Acquire>(item.operation).nonce)
                return;
            result = Decided{Granted{.kind = Granted::Kind::repeated,
                                     .token = record.token,
                                     .attempt = record.attempt,
                                     .generation = record.generation,
                                     .lease_end = record.lease_end,
                                     .possible_second_payment = record.follows_unknown,
                                     .created = record.created},
                             read_at};
        }

        void note_completed(const StoredKey& key, const StoreOutcome& outcome) {
            const RecordPtr* record = nullptr;
            if (const auto* applied = std::get_if<Applied>(&outcome)) record = &applied->record;
            if (const auto* replay = std::get_if<Replay>(&outcome)) record = &replay->record;
            if (record != nullptr && *record && (*record)->status == Status::completed)
                store_.known_completed_.remember(key);
        }

        RedisStore& store_;
        std::vector<Item> items_;
        BatchDone done_;
        BatchResults results_;
        std::vector<Todo> todo_;                               ///< Of the rounds to come.
        std::vector<Asked> asked_;                             ///< Of the round that is on its way.
        std::unordered_map<std::size_t, RecordPtr> seen_;      ///< By see_turn.
        std::unordered_map<std::size_t, std::string> fences_;  ///< By see_fence.
    };

    const RedisOptions options_;
    const redis::Names names_;
    std::unique_ptr<redis::Client> client_;
    redis::Listing listing_;
    const Durability durability_;
    const std::uint64_t argument_max_bytes_;
    /// When the server last refused something for want of memory, by the steady clock.
    std::atomic<base::SteadyTime::rep> full_at_{base::SteadyTime::min().time_since_epoch().count()};
    KnownCompleted known_completed_;
    std::atomic<bool> stopped_{false};
};

}  // namespace

base::Result<std::unique_ptr<core::Store>> open_redis_store(const RedisOptions& options,
                                                            RedisReport* report) {
    auto target = redis::parse_url(options.url);
    if (!target) return target.error();
    auto client = redis::Client::connect({.target = std::move(*target),
                                          .cluster = options.cluster,
                                          .ca_file = options.ca_file,
                                          .sentinel_user = options.sentinel_user,
                                          .sentinel_password = options.sentinel_password,
                                          .scripts = redis::scripts().all(),
                                          .wait_replicas = options.wait_replicas,
                                          .wait_timeout = options.wait_timeout});
    if (!client) return client.error();
    auto findings = redis::check_servers(**client, options.prefix, options.accept_eviction,
                                         options.wait_replicas);
    if (!findings) return findings.error();
    if (report != nullptr) *report = {findings->version, findings->notices, findings->wrong};
    return std::unique_ptr<core::Store>(
        std::make_unique<RedisStore>(options, std::move(*client), std::move(findings->durability),
                                     findings->argument_max_bytes));
}

}  // namespace semel::stores
