#include "consumer/records.hpp"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <iterator>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>

#include "consumer/answer_seal.hpp"

namespace semel::consumer {
namespace {

using base::Digest;
using std::chrono::milliseconds;
using Results = std::vector<base::Result<core::Decided>>;

/// Most steps of one batch for a store.
constexpr std::size_t batch_steps_max = 512;
/// Between two tries to connect, for one thread; doubled each time.
constexpr milliseconds connect_again_first{50};
constexpr milliseconds connect_again_max{2000};

/// What other threads hold: they post through it. Closed under its mutex before its Records goes,
/// so that no post meets a dead loop.
struct Gate {
    std::mutex mutex;
    runtime::Loop* loop = nullptr;
    std::size_t out = 0;  ///< On the loop.
};

/// On any thread: has `done` called on the loop.
void answer(const std::shared_ptr<Gate>& gate, RecordsDone done, Results results) {
    const std::lock_guard lock(gate->mutex);
    if (gate->loop == nullptr) return;
    gate->loop->post([gate, done = std::move(done), results = std::move(results)]() mutable {
        if (gate->loop == nullptr) return;
        --gate->out;
        done(std::move(results));
    });
}

class Gated : public Records {
  public:
    explicit Gated(runtime::Loop& loop) : gate_(std::make_shared<Gate>()) { gate_->loop = &loop; }
    ~Gated() override { close(); }
    [[nodiscard]] std::size_t out() const override { return gate_->out; }

  protected:
    void close() {
        const std::lock_guard lock(gate_->mutex);
        gate_->loop = nullptr;
    }
    const std::shared_ptr<Gate> gate_;
};

// -------------------------------------------------------------------- on a store

class StoreRecords final : public Gated {
  public:
    StoreRecords(runtime::Loop& loop, core::Store& store, const base::Hmac& secret,
                 std::string name, std::optional<AnswersOf> answers)
        : Gated(loop), loop_(loop), store_(store), secret_(secret), name_(std::move(name)) {
        if (!answers) return;
        seal_.emplace(loop, store, answers->vault, answers->tenant,
                      [&loop, gate = gate_](runtime::Task<> task) {
                          loop.spawn(unless_over(gate, std::move(task)));
                      });
    }

    void submit(RecordSteps steps, RecordsDone done) override {
        ++gate_->out;
        const bool concerns_answers =
            seal_ && std::any_of(steps.begin(), steps.end(), [](const RecordStep& step) {
                return AnswerSeal::concerns(step.operation);
            });
        if (!concerns_answers) return submit(std::move(steps), std::move(done), nullptr);
        if (auto key = seal_->ready())
            return submit(std::move(steps), std::move(done), std::move(key));
        loop_.spawn(unless_over(gate_, submit_with_key(std::move(steps), std::move(done))));
    }

    [[nodiscard]] bool by_name() const override { return false; }
    [[nodiscard]] std::string name() const override { return name_; }

  private:
    using StoredKeys = std::vector<core::StoredKey>;
    struct Parts {
        std::mutex mutex;
        std::vector<Results> results;
        std::size_t missing = 0;
    };

    /// The records may end before it begins.
    static runtime::Task<> unless_over(std::shared_ptr<Gate> gate, runtime::Task<> task) {
        if (gate->loop != nullptr) co_await std::move(task);
    }

    /// `key`: that of the answers in it; null: there are none.
    void submit(RecordSteps steps, RecordsDone done, engine::DataKeyPtr key) {
        const bool may_replay =
            key && std::any_of(steps.begin(), steps.end(), [](const RecordStep& step) {
                return std::holds_alternative<core::Acquire>(step.operation);
            });
        if (may_replay) done = opening(keys_of(steps), std::move(done), key);
        if (steps.size() > batch_steps_max) return submit_parts(steps, std::move(done), key.get());
        std::vector<core::Item> items = items_of(steps, 0, steps.size(), key.get());
        store_.submit(std::move(items),
                      [gate = gate_, done = std::move(done)](core::BatchResults results) mutable {
                          answer(gate, std::move(done), std::move(results));
                      });
    }

    runtime::Task<> submit_with_key(RecordSteps steps, RecordsDone done) {
        auto key = co_await seal_->ask();
        if (key) {
            submit(std::move(steps), std::move(done), std::move(*key));
        } else {
            answer(gate_, std::move(done), Results(steps.size(), key.error()));
        }
    }

    /// `done`, told of the answers as they were given.
    RecordsDone opening(StoredKeys keys, RecordsDone done, engine::DataKeyPtr key) {
        return [this, keys = std::move(keys), done = std::move(done),
                key = std::move(key)](Results results) mutable {
            if (!sealed_under_another(results, *key)) {
                open(keys, results, key.get());
                return done(std::move(results));
            }
            // The tenant was erased, here or just now elsewhere: which, the store's key tells.
            loop_.spawn(unless_over(
                gate_, open_anew(std::move(keys), std::move(done), std::move(results))));
        };
    }

    runtime::Task<> open_anew(StoredKeys keys, RecordsDone done, Results results) {
        auto key = co_await seal_->ask_anew();
        if (key) {
            open(keys, results, key->get());
        } else {
            for (auto& one : results) {
                if (one && std::holds_alternative<core::Replay>(one->outcome)) one = key.error();
            }
        }
        done(std::move(results));
    }

    static void open(const StoredKeys& keys, Results& results, const engine::DataKey* key) {
        for (std::size_t i = 0; i < results.size(); ++i)
            if (results[i]) engine::open_answered(keys[i], results[i]->outcome, key);
    }

    void submit_parts(RecordSteps& steps, RecordsDone done, const engine::DataKey* key) {
        auto parts = std::make_shared<Parts>();
        const std::size_t count = (steps.size() + batch_steps_max - 1) / batch_steps_max;
        parts->results.resize(count);
        parts->missing = count;
        for (std::size_t n = 0; n < count; ++n) {
            const std::size_t from = n * batch_steps_max;
            const std::size_t to = std::min(steps.size(), from + batch_steps_max);
            store_.submit(items_of(steps, from, to, key),
                          [gate = gate_, parts, done, n](core::BatchResults results) {
                              Results all;
                              {
                                  const std::lock_guard lock(parts->mutex);
                                  parts->results[n] = std::move(results);
                                  if (--parts->missing != 0) return;
                                  for (Results& part : parts->results)
                                      std::move(part.begin(), part.end(), std::back_inserter(all));
                              }
                              answer(gate, done, std::move(all));
                          });
        }
    }

    std::vector<core::Item> items_of(RecordSteps& steps, std::size_t from, std::size_t to,
                                     const engine::DataKey* key) {
        std::vector<core::Item> items;
        items.reserve(to - from);
        for (std::size_t i = from; i < to; ++i) {
            core::Item& item = items.emplace_back();
            item.key = stored_key(steps[i].key);
            std::visit(
                [&item](auto& one) {
                    item.operation.emplace<std::remove_reference_t<decltype(one)>>(std::move(one));
                },
                steps[i].operation);
            if (key != nullptr) seal_->seal(item, *key);
        }
        return items;
    }

    StoredKeys keys_of(const RecordSteps& steps) {
        StoredKeys keys;
        keys.reserve(steps.size());
        for (const RecordStep& step : steps) keys.push_back(stored_key(step.key));
        return keys;
    }

    /// A message has several steps shortly one after the other; the HMAC is the dearest part of
    /// each.
    core::StoredKey stored_key(const Digest& key) {
        Known& known = known_[base::DigestHash{}(key) % known_.size()];
        if (known.key == key && !known.stored.empty()) return known.stored;
        std::array<char, kind.size() + sizeof key.bytes> text;
        std::memcpy(text.data(), kind.data(), kind.size());
        std::memcpy(text.data() + kind.size(), key.bytes.data(), sizeof key.bytes);
        known = {key, secret_(std::string_view(text.data(), text.size()))};
        return known.stored;
    }

    struct Known {
        Digest key;
        core::StoredKey stored;
    };
    static constexpr std::string_view kind = "message";
    static constexpr std::size_t known_keys = 4096;

    runtime::Loop& loop_;
    core::Store& store_;
    const base::Hmac& secret_;
    const std::string name_;
    std::vector<Known> known_ = std::vector<Known>(known_keys);
    std::optional<AnswerSeal> seal_;  ///< Empty: there are no answers.
};

// -------------------------------------------------------------------- on a table

class TableRecords final : public Gated {
  public:
    TableRecords(runtime::Loop& loop, inbox::DedupOptions options, inbox::Connect connect,
                 unsigned connections, std::string name)
        : Gated(loop),
          table_(std::move(options)),
          connect_(std::move(connect)),
          name_(std::move(name)) {
        for (unsigned n = 0; n < std::max(connections, 1U); ++n)
            threads_.emplace_back([this] { work(); });
    }
    ~TableRecords() override {
        close();
        {
            const std::lock_guard lock(mutex_);
            ending_ = true;
        }
        more_.notify_all();
        threads_.clear();  // joins: a statement that runs ends first
    }

    void submit(RecordSteps steps, RecordsDone done) override {
        ++gate_->out;
        {
            const std::lock_guard lock(mutex_);
            queue_.push_back({std::move(steps), std::move(done)});
        }
        more_.notify_one();
    }

    [[nodiscard]] std::string name() const override { return name_; }

  private:
    struct Batch {
        RecordSteps steps;
        RecordsDone done;
    };
    /// One thread's connection.
    struct Connection {
        std::shared_ptr<sql::Executor> executor;
        milliseconds again{connect_again_first};
        base::SteadyTime not_before{};
        std::string problem;  ///< Why there is none.
    };

    void work() {
        Connection connection;
        for (;;) {
            Batch batch;
            {
                std::unique_lock lock(mutex_);
                more_.wait(lock, [this] { return ending_ || !queue_.empty(); });
                if (ending_) return;
                batch = std::move(queue_.front());
                queue_.pop_front();
            }
            answer(gate_, std::move(batch.done), apply(connection, std::move(batch.steps)));
        }
    }

    Results apply(Connection& connection, RecordSteps steps) {
        if (!connection.executor && !open(connection)) {
            return Results(steps.size(), base::Error{.code = base::ErrorCode::store_unavailable,
                                                     .applied = base::Applied::no,
                                                     .retry_after = connection.again,
                                                     .detail = name_ + ": " + connection.problem});
        }
        std::vector<inbox::DedupItem> items;
        items.reserve(steps.size());
        for (RecordStep& step : steps) {
            items.push_back({.source = std::move(step.source),
                             .id = std::move(step.id),
                             .operation = std::move(step.operation),
                             .business_key = std::move(step.business_key)});
        }
        Results results = table_.apply(*connection.executor, std::move(items));
        const bool away = std::any_of(results.begin(), results.end(), [](const auto& one) {
            return !one && one.error().code == base::ErrorCode::store_unavailable;
        });
        // Whether the connection broke or a row stayed locked is not told: a new one costs little
        // beside either.
        if (away) connection.executor.reset();
        return results;
    }

    /// False: there is none now. Does not wait: who asks decides when to ask again.
    bool open(Connection& connection) {
        const auto now = std::chrono::steady_clock::now();
        if (now < connection.not_before) return false;
        auto opened = connect_();
        if (auto* problem = std::get_if<sql::Problem>(&opened)) {
            connection.problem = std::move(problem->error.detail);
            connection.not_before = now + connection.again;
            connection.again = std::min(connection.again * 2, connect_again_max);
            return false;
        }
        connection.executor = std::move(std::get<0>(opened));
        connection.again = connect_again_first;
        return true;
    }

    const inbox::DedupTable table_;
    const inbox::Connect connect_;
    const std::string name_;
    std::mutex mutex_;  // guards the three below
    std::condition_variable more_;
    std::deque<Batch> queue_;
    bool ending_ = false;
    std::vector<std::jthread> threads_;  // last: they use all of the above
};

}  // namespace

RecordStep step_on(const Message& message, core::Operation operation) {
    return {.key = message.key,
            .source = message.source,
            .id = message.id,
            .business_key = message.business_key,
            .operation = std::move(operation)};
}

std::unique_ptr<Records> records_on_store(runtime::Loop& loop, core::Store& store,
                                          const base::Hmac& secret, std::string name,
                                          std::optional<AnswersOf> answers) {
    return std::make_unique<StoreRecords>(loop, store, secret, std::move(name), answers);
}

std::unique_ptr<Records> records_on_table(runtime::Loop& loop, inbox::DedupOptions options,
                                          inbox::Connect connect, unsigned connections,
                                          std::string name) {
    return std::make_unique<TableRecords>(loop, std::move(options), std::move(connect), connections,
                                          std::move(name));
}

}  // namespace semel::consumer
