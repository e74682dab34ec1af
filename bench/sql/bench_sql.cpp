// Drives the stores on SQL databases as engines do, and prints one JSON object.
//
//     bench_sql postgres|mysql URL pairs|duplicates [--callers N] [--connections C] [--batch B]
//               [--alone 0|1] [--duplicates PERCENT] [--milliseconds T] [--warm-up T]
//     bench_sql postgres|mysql URL purge --every MS --step N --steps N
//
// N callers are in flight at a time. `pairs`: each acquires a new key, completes it with 1 KiB and
// begins again; counted as one. PERCENT of them ask for a call that is completed, and are replayed
// instead; counted as one too. `duplicates`: all of them. What becomes ready within one turn of the
// driving thread is handed over as one batch and answered item by item, as on an engine's loop;
// with --alone 1 every caller hands over by itself, as if each were a process of its own. `begin`
// is printed when counting begins.
//
// `purge` does what a gateway's sweeper does, until its input ends: every MS milliseconds at most
// `steps` purges of at most `step` records. Prints how many were removed.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/answers_singly.hpp"
#include "core/store.hpp"
#include "fail.hpp"
#include "intents.hpp"
#include "stores/mysql/mysql_store.hpp"
#include "stores/postgres/postgres_store.hpp"

namespace {

using namespace bench;
using Steady = std::chrono::steady_clock;

constexpr std::uint64_t completed_records = 10'000;

struct Settings {
    std::string store, url, mode;
    std::size_t callers = 1;
    std::int64_t connections = 4, batch = 64, alone = 0, duplicates = 0;
    std::int64_t milliseconds = 1000, warm_up = 300;
    std::int64_t every = 3300, step = 512, steps = 64;
};

std::unique_ptr<Store> open(const Settings& settings) {
    const auto connections = static_cast<unsigned>(settings.connections);
    const auto batch = static_cast<std::size_t>(settings.batch);
    auto opened = settings.store == "postgres"
                      ? stores::open_postgres_store({.url = settings.url,
                                                     .schema = {},
                                                     .connections = connections,
                                                     .batch_max = batch,
                                                     .time = {}})
                      : stores::open_mysql_store({.url = settings.url,
                                                  .connections = connections,
                                                  .batch_max = batch,
                                                  .time = {}});
    if (!opened) fail(opened.error().detail);
    return std::move(*opened);
}

BatchResults ask(Store& store, std::vector<Item> items) {
    std::promise<BatchResults> promise;
    auto future = promise.get_future();
    store.submit(std::move(items),
                 [&](BatchResults results) { promise.set_value(std::move(results)); });
    return future.get();
}

/// Records 0 to completed_records, unless they are there.
void fill(Store& store) {
    constexpr std::uint64_t step = 512;
    for (std::uint64_t first = 0; first < completed_records; first += step) {
        const std::uint64_t end = std::min(first + step, completed_records);
        std::vector<Item> acquires, completes;
        for (std::uint64_t n = first; n < end; ++n) acquires.push_back({key_of(n), acquire_of(n)});
        const BatchResults results = ask(store, std::move(acquires));
        for (std::size_t i = 0; i < results.size(); ++i) {
            if (!results[i]) fail(results[i].error().detail);
            const std::uint64_t n = first + i;
            if (const auto* granted = std::get_if<Granted>(&results[i]->outcome))
                completes.push_back({key_of(n), complete_of(granted->token, nonce_of(n))});
        }
        if (completes.empty()) continue;
        for (const auto& result : ask(store, std::move(completes))) {
            if (!result) fail(result.error().detail);
        }
    }
}

// ---------------------------------------------------------------- callers

/// All callers, on one thread.
class Callers {
  public:
    Callers(AnswersSingly& store, const Settings& settings)
        : singly_(store),
          settings_(settings),
          // New keys of every run: nobody had those of this nanosecond.
          next_(static_cast<std::uint64_t>(Steady::now().time_since_epoch().count())) {}

    /// Runs until `end` and waits for the last answers; those that came by then count.
    void run(Steady::time_point begin, Steady::time_point end) {
        count_from_ = begin;
        count_to_ = end;
        std::vector<Call> calls;
        for (std::size_t i = 0; i < settings_.callers; ++i) calls.push_back(fresh());
        hand_over(std::move(calls));
        while (outstanding_ > 0) hand_over(turn());
    }
    [[nodiscard]] std::uint64_t done() const { return done_; }
    [[nodiscard]] std::uint64_t replayed() const { return replayed_; }
    /// From the first question of a call to its last answer.
    std::uint32_t took_us(double quantile) {
        if (took_us_.empty()) return 0;
        const auto at =
            static_cast<std::ptrdiff_t>(quantile * static_cast<double>(took_us_.size() - 1));
        std::nth_element(took_us_.begin(), took_us_.begin() + at, took_us_.end());
        return took_us_[static_cast<std::size_t>(at)];
    }

  private:
    struct Call {
        std::uint64_t n = 0;
        bool known = false;  ///< Asks for a record that is completed.
        bool completes = false;
        FencingToken token;
        Steady::time_point since;
    };
    struct Ready {
        Call call;
        base::Result<Decided> result;
    };

    Call fresh() {
        Call call{
            .n = next_++, .known = false, .completes = false, .token = {}, .since = Steady::now()};
        // Spread evenly, also within a batch: of consecutive numbers every tenth, fifth, ...
        ++asked_;
        const auto percent = static_cast<std::uint64_t>(settings_.duplicates);
        call.known = asked_ * percent / 100 != (asked_ - 1) * percent / 100;
        if (call.known) call.n = (call.n * 7919) % completed_records;
        return call;
    }

    void hand_over(std::vector<Call> calls) {
        if (calls.empty()) return;
        if (settings_.alone == 0) return send(std::move(calls));
        for (const Call& call : calls) send({call});
    }

    void send(std::vector<Call> calls) {
        outstanding_ += calls.size();
        std::vector<Item> items;
        items.reserve(calls.size());
        for (const Call& call : calls) {
            if (call.completes)
                items.push_back({key_of(call.n), complete_of(call.token, nonce_of(call.n))});
            else
                items.push_back({key_of(call.n), acquire_of(call.n)});
        }
        auto shared = std::make_shared<const std::vector<Call>>(std::move(calls));
        singly_.submit_singly(std::move(items),
                              [this, shared](std::size_t i, base::Result<Decided> result) {
                                  bool wake = false;
                                  {
                                      const std::lock_guard lock(mutex_);
                                      ready_.push_back({(*shared)[i], std::move(result)});
                                      wake = std::exchange(waiting_, false);
                                  }
                                  if (wake) wake_.notify_one();
                              });
    }

    /// Waits for answers, and gives what their callers ask next.
    std::vector<Call> turn() {
        std::vector<Ready> taken;
        {
            std::unique_lock lock(mutex_);
            waiting_ = true;
            wake_.wait(lock, [&] { return !ready_.empty(); });
            waiting_ = false;
            taken.swap(ready_);
        }
        const auto now = Steady::now();
        const bool counts = now >= count_from_ && now < count_to_;
        if (counts && !told_) {
            told_ = true;
            std::printf("begin\n");
            std::fflush(stdout);
        }
        std::vector<Call> next;
        for (Ready& ready : taken) {
            --outstanding_;
            Call& call = ready.call;
            const auto& result = ready.result;
            if (!result) fail(result.error().detail);
            if (!call.completes && !call.known) {
                const auto* granted = std::get_if<Granted>(&result->outcome);
                if (granted == nullptr) fail("a new key was not granted");
                call.completes = true;
                call.token = granted->token;
                next.push_back(call);
                continue;
            }
            if (call.completes ? !std::holds_alternative<Applied>(result->outcome)
                               : !replays(result->outcome))
                fail("an outcome that " + settings_.mode + " must not have");
            if (counts) {
                ++done_;
                replayed_ += call.known ? 1 : 0;
                took_us_.push_back(static_cast<std::uint32_t>(
                    std::chrono::duration_cast<std::chrono::microseconds>(now - call.since)
                        .count()));
            }
            if (now < count_to_) next.push_back(fresh());
        }
        return next;
    }

    static bool replays(const StoreOutcome& outcome) {
        const auto* replay = std::get_if<Replay>(&outcome);
        return replay != nullptr && replay->record->answer.has_value() &&
               replay->record->answer->body != nullptr &&
               replay->record->answer->body->size() == body_bytes;
    }

    AnswersSingly& singly_;
    const Settings& settings_;
    std::uint64_t next_;
    std::uint64_t asked_ = 0;
    std::uint64_t done_ = 0;
    std::uint64_t replayed_ = 0;
    std::vector<std::uint32_t> took_us_;
    std::size_t outstanding_ = 0;
    bool told_ = false;
    Steady::time_point count_from_, count_to_;
    std::mutex mutex_;  // guards all below
    std::condition_variable wake_;
    std::vector<Ready> ready_;
    bool waiting_ = false;
};

void measure(const Settings& settings) {
    const auto store = open(settings);
    if (settings.duplicates > 0) fill(*store);
    auto* const singly = dynamic_cast<AnswersSingly*>(store.get());
    if (singly == nullptr) fail("the store does not answer singly, as engines ask it to");
    Callers callers(*singly, settings);
    const auto begin = Steady::now() + std::chrono::milliseconds(settings.warm_up);
    callers.run(begin, begin + std::chrono::milliseconds(settings.milliseconds));
    const double seconds = static_cast<double>(settings.milliseconds) / 1000;
    if (settings.duplicates > 0 && callers.replayed() == 0) fail("nothing was replayed");
    std::printf(
        "{\"operations\":%llu,\"per_second\":%.1f,\"replayed\":%llu,\"p50_us\":%u,\"p99_us\":%u}\n",
        static_cast<unsigned long long>(callers.done()),
        static_cast<double>(callers.done()) / seconds,
        static_cast<unsigned long long>(callers.replayed()), callers.took_us(0.5),
        callers.took_us(0.99));
    store->stop();
}

// ---------------------------------------------------------------- purge

void purge(const Settings& settings) {
    const auto store = open(settings);
    std::printf("ready\n");
    std::fflush(stdout);
    std::size_t removed = 0;
    bool over = false;
    double longest_ms = 0;
    const auto start = Steady::now();
    while (!over) {
        for (std::int64_t i = 0; i < settings.steps && !over; ++i) {
            const auto before = Steady::now();
            const auto gone = store->purge(static_cast<std::size_t>(settings.step));
            if (!gone) fail(gone.error().detail);
            longest_ms =
                std::max(longest_ms,
                         std::chrono::duration<double, std::milli>(Steady::now() - before).count());
            removed += *gone;
            if (*gone < static_cast<std::size_t>(settings.step)) break;
            pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
            over = poll(&input, 1, 0) != 0;
        }
        pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
        over = over || poll(&input, 1, static_cast<int>(settings.every)) != 0;
    }
    const double seconds = std::chrono::duration<double>(Steady::now() - start).count();
    std::printf("{\"removed\":%zu,\"seconds\":%.2f,\"longest_step_ms\":%.1f}\n", removed, seconds,
                longest_ms);
    store->stop();
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4 || argc % 2 != 0)
        fail("wants postgres or mysql, a URL, a mode and options: see the top of bench_sql.cpp");
    Settings settings{.store = argv[1], .url = argv[2], .mode = argv[3]};
    if (settings.store != "postgres" && settings.store != "mysql")
        fail("there is no store " + settings.store);
    std::int64_t callers = 1;
    const std::pair<std::string_view, std::int64_t*> options[] = {
        {"--callers", &callers},
        {"--connections", &settings.connections},
        {"--batch", &settings.batch},
        {"--alone", &settings.alone},
        {"--duplicates", &settings.duplicates},
        {"--milliseconds", &settings.milliseconds},
        {"--warm-up", &settings.warm_up},
        {"--every", &settings.every},
        {"--step", &settings.step},
        {"--steps", &settings.steps},
    };
    for (int i = 4; i + 1 < argc; i += 2) {
        const auto* const found = std::find_if(std::begin(options), std::end(options),
                                               [&](const auto& o) { return o.first == argv[i]; });
        if (found == std::end(options)) fail("unknown option " + std::string(argv[i]));
        *found->second = std::atoll(argv[i + 1]);
    }
    if (callers <= 0 || settings.connections <= 0 || settings.batch <= 0 ||
        settings.milliseconds <= 0)
        fail("callers, connections, batch and milliseconds must be positive");
    settings.callers = static_cast<std::size_t>(callers);
    if (settings.mode == "purge") {
        purge(settings);
        return 0;
    }
    if (settings.mode == "duplicates") settings.duplicates = 100;
    if (settings.mode != "pairs" && settings.mode != "duplicates")
        fail("unknown mode " + settings.mode);
    measure(settings);
}
