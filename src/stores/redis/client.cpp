// The client: takes commands from any thread, routes them on its own, cures what can be cured,
// answers.
#include "stores/redis/client.hpp"

#include <algorithm>
#include <future>
#include <map>
#include <mutex>
#include <thread>

#include "stores/redis/topology.hpp"

namespace semel::stores::redis {

namespace {

using std::chrono::steady_clock;

constexpr milliseconds kTick{50};
// A tick that is so late means that this process stood still: what the servers sent meanwhile is
// read before they are judged.
constexpr milliseconds kStoodStill{500};
// A command that the server can't execute now is tried again after these.
constexpr milliseconds kRetryFirst{10};
constexpr milliseconds kRetryMost{500};
// A command that is sent on so often waits before the next time: the nodes may disagree for a
// while. Then it begins with the map, which may be an old one, and is sent on again: each wait is
// followed by as many redirections.
constexpr std::uint8_t kImmediateRedirections = 5;
constexpr std::uint8_t kMostTries = 100;

class RedisClient final : public Client, Topology::Host {
  public:
    explicit RedisClient(ClientOptions options) { shared_.options = std::move(options); }
    ~RedisClient() override { stop(); }

    base::Result<void> open() {
        if (shared_.options.target.tls) {
            auto context = tls_context(shared_.options.ca_file);
            if (!context) return context.error();
            shared_.tls = std::move(*context);
        }
        topology_ = shared_.options.cluster ? cluster_topology(shared_, *this)
                                            : single_topology(shared_, *this);
        auto opened = opened_.get_future();
        asio::post(shared_.io, [this] {
            last_tick_ = steady_clock::now();
            topology_->start();
            arm();
        });
        thread_ = std::thread([this] { shared_.io.run(); });
        io_thread_ = thread_.get_id();
        if (auto failed = opened.get()) return std::move(*failed);
        return {};
    }

    void submit(std::vector<Command> commands, Done done) override {
        if (commands.empty()) return done({});
        Submission one{std::move(commands), std::move(done),
                       steady_clock::now() + shared_.options.patience};
        bool wake = false;
        {
            const std::lock_guard lock(inbox_mutex_);
            if (!stopped_) {
                inbox_.push_back(std::move(one));
                wake = !std::exchange(awake_, true);
            }
        }
        // Not taken over: nothing is sent any more.
        if (one.done) return refuse_all(std::move(one));
        if (wake) asio::post(shared_.io, [this] { drain(); });
    }

    std::vector<Node> masters() const override {
        const std::lock_guard lock(published_mutex_);
        return masters_;
    }

    Answer ask(const std::string& master, const std::vector<std::string>& arguments) override {
        SEMEL_ASSERT(std::this_thread::get_id() != io_thread_,
                     "ask() on a callback waits for itself");
        std::promise<Answer> promise;
        auto answer = promise.get_future();
        Done done = [&promise](std::vector<Answer> answers) {
            promise.set_value(std::move(answers.front()));
        };
        const SteadyTime deadline = steady_clock::now() + shared_.options.patience;
        {
            const std::lock_guard lock(inbox_mutex_);
            if (stopped_) return NoReply{.detail = kStoppedText};
            // Under the lock: stop() posts its own after it, and so answers this.
            asio::post(shared_.io,
                       [this, master, arguments, deadline, done = std::move(done)]() mutable {
                           ask_now(master, plain_command(arguments), deadline, std::move(done));
                       });
        }
        return answer.get();
    }

    SteadyTime answering_since() const override {
        if (!answering_.load(std::memory_order_acquire)) return steady_clock::now();
        return SteadyTime{SteadyTime::duration{answering_since_.load(std::memory_order_acquire)}};
    }
    std::int64_t clock_offset_us() const override {
        return clock_offset_us_.load(std::memory_order_relaxed);
    }

    base::Result<void> health() const override {
        const std::lock_guard lock(published_mutex_);
        if (problem_) return *problem_;
        return {};
    }

    Counters counters() const override {
        const auto read = [](const std::atomic<std::uint64_t>& from) {
            return from.load(std::memory_order_relaxed);
        };
        return {read(shared_.connections), read(shared_.scripts_resent), read(shared_.redirections),
                read(shared_.lost_replies), read(shared_.not_replicated)};
    }

    void stop() override {
        const std::lock_guard once(stop_mutex_);
        if (!thread_.joinable()) return;
        SEMEL_ASSERT(std::this_thread::get_id() != io_thread_,
                     "stop() on a callback waits for itself");
        {
            const std::lock_guard lock(inbox_mutex_);
            stopped_ = true;
            asio::post(shared_.io, [this] { finish(); });
        }
        thread_.join();
        for (Submission& one : std::exchange(inbox_, {})) refuse_all(std::move(one));
        const std::lock_guard lock(published_mutex_);
        problem_ = base::Error{.code = base::ErrorCode::stopping, .detail = kStoppedText};
    }

  private:
    static constexpr const char* kStoppedText =
        "the connection to Redis is closed: this process is shutting down";

    struct Submission {
        std::vector<Command> commands;
        Done done;
        SteadyTime deadline;
    };
    struct Delayed {
        Pending pending;
        std::string why;
        std::weak_ptr<Connection> where;  // of a pinned command
    };

    // ------------------------------------------------------------ any thread

    static void refuse_all(Submission one) {
        std::vector<Answer> answers(one.commands.size(), NoReply{.detail = kStoppedText});
        one.done(std::move(answers));
    }

    // ------------------------------------------------------------ the client's thread from here on

    void drain() {
        draining_.clear();
        {
            const std::lock_guard lock(inbox_mutex_);
            awake_ = false;
            if (stopped_) return;  // stop() answers them
            std::swap(inbox_, draining_);
        }
        for (Submission& one : draining_) {
            auto* const batch = new Batch(one.commands.size(), std::move(one.done), one.deadline);
            for (std::size_t i = 0; i < one.commands.size(); ++i)
                dispatch(Pending(std::move(one.commands[i]), *batch, i));
        }
        flush_all();
    }

    void ask_now(const std::string& master, Command command, SteadyTime deadline, Done done) {
        auto* const batch = new Batch(1, std::move(done), deadline);
        Pending pending(std::move(command), *batch, 0);
        pending.pinned = true;
        for (const auto& one : topology_->masters()) {
            if (one->name() != master) continue;
            one->enqueue(std::move(pending));
            one->flush();
            return;
        }
        pending.refuse("there is no master " + master + " now");
    }

    void dispatch(Pending pending) override {
        if (Connection* const connection = topology_->route(pending.command.slot))
            return connection->enqueue(std::move(pending));
        const std::string slot = std::to_string(pending.command.slot);
        later(std::move(pending),
              "no node of the Cluster serves slot " + slot +
                  ": see CLUSTER INFO, and assign it (redis-cli --cluster fix)");
    }

    void flush_all() {
        for (const auto& connection : topology_->all()) connection->flush();
    }

    /// Tries again after a while; `at` is where, if the command is pinned.
    void later(Pending pending, std::string why, Connection* at = nullptr) {
        const milliseconds delay = shared_.backoff(kRetryFirst, kRetryMost, pending.tries);
        pending.tries = static_cast<std::uint8_t>(std::min<int>(pending.tries + 1, kMostTries));
        const SteadyTime due = std::min(steady_clock::now() + delay, pending.batch->deadline());
        const bool first = delayed_.empty() || due < delayed_.begin()->first;
        Delayed one{std::move(pending), std::move(why), {}};
        if (one.pending.pinned && at != nullptr) one.where = at->weak_from_this();
        delayed_.emplace(due, std::move(one));
        if (first) arm_retry();
    }

    void arm_retry() {
        retry_timer_.expires_at(delayed_.begin()->first);
        retry_timer_.async_wait([this](error_code ec) {
            if (!ec) retry();
        });
    }

    void retry() {
        const SteadyTime now = steady_clock::now();
        std::vector<Delayed> due;
        while (!delayed_.empty() && delayed_.begin()->first <= now) {
            due.push_back(std::move(delayed_.begin()->second));
            delayed_.erase(delayed_.begin());
        }
        for (Delayed& one : due) {
            if (one.pending.expired(now)) {
                one.pending.refuse(one.why + "; tried for " +
                                   std::to_string(shared_.options.patience.count()) + " ms");
            } else if (!one.pending.pinned) {
                dispatch(std::move(one.pending));
            } else if (const auto where = one.where.lock()) {
                where->enqueue(std::move(one.pending));
            } else {
                one.pending.refuse(one.why);
            }
        }
        flush_all();
        if (!delayed_.empty()) arm_retry();
    }

    void command_refused(Connection& connection, Pending pending, const Reply& error) override {
        pending.asking = false;
        Refusal refusal = judge(error.text, connection.name(), name_of(pending.command));
        switch (refusal.cure) {
            case Cure::follow:
            case Cure::ask:
                return follow(connection, std::move(pending), std::move(refusal), error.text);
            case Cure::find_master:
                if (topology_->look_elsewhere(connection) ||
                    !std::exchange(pending.met_replica, true))
                    return later(std::move(pending), std::move(refusal.sentence), &connection);
                return pending.refuse(std::move(refusal.sentence));
            case Cure::ask_others:
                topology_->look_elsewhere(connection);
                [[fallthrough]];
            case Cure::later:
                return later(std::move(pending), std::move(refusal.sentence), &connection);
            case Cure::full:
                return pending.refuse(std::move(refusal.sentence), true);
            case Cure::uncertain:
                return pending.give_up(std::move(refusal.sentence));
            case Cure::send_source:  // to a plain command: no script of ours
            case Cure::none:
                return pending.refuse(std::move(refusal.sentence));
        }
    }

    void follow(Connection& from, Pending pending, Refusal refusal, std::string_view error) {
        const auto to = redirection(error, from.place().address.host);
        if (pending.pinned || !to) return pending.refuse(std::move(refusal.sentence));
        Connection* const node = topology_->redirected(refusal.cure, *to);
        if (node == nullptr)
            return pending.refuse("the server " + from.name() +
                                  " is a node of a Redis Cluster: set `cluster: true`");
        shared_.redirections.fetch_add(1, std::memory_order_relaxed);
        if (pending.tries % kImmediateRedirections == kImmediateRedirections - 1)
            return later(std::move(pending), std::move(refusal.sentence));
        ++pending.tries;
        pending.asking = refusal.cure == Cure::ask;
        node->enqueue(std::move(pending));
        if (node != &from) node->flush();
    }

    void opened(std::optional<base::Error> failed) override {
        publish(steady_clock::now());
        opened_.set_value(std::move(failed));
    }

    void locate(Connection& connection) override { topology_->locate(connection); }
    void connection_ready(Connection& connection) override {
        woke();
        topology_->ready(connection);
        publish(steady_clock::now());
    }
    void connection_lost(Connection& connection, const base::Error& why) override {
        answering_.store(false, std::memory_order_release);
        topology_->lost(connection, why);
        publish(steady_clock::now());
    }
    void connection_woke(Connection&) override { woke(); }
    void clock_offset(std::int64_t us) override {
        clock_offset_us_.store(us, std::memory_order_relaxed);
    }

    void woke() {
        answering_since_.store(steady_clock::now().time_since_epoch().count(),
                               std::memory_order_release);
    }

    // What other threads see of the servers.
    void publish(SteadyTime now) {
        std::optional<base::Error> problem;
        std::vector<Node> nodes;
        for (const auto& one : topology_->masters()) {
            nodes.push_back({.name = one->name()});
            if (!problem) problem = one->problem(now);
        }
        answering_.store(!problem, std::memory_order_release);
        const std::lock_guard lock(published_mutex_);
        masters_ = std::move(nodes);
        problem_ = std::move(problem);
    }

    void arm() {
        tick_timer_.expires_after(kTick);
        tick_timer_.async_wait([this](error_code ec) {
            if (!ec) tick();
        });
    }

    void tick() {
        const SteadyTime now = steady_clock::now();
        if (now - std::exchange(last_tick_, now) < kTick + kStoodStill) {
            for (const auto& connection : Topology::Connections(topology_->all()))
                connection->tick(now);
            topology_->tick(now);
            publish(now);
            flush_all();
        }
        arm();
    }

    void finish() {
        tick_timer_.cancel();
        retry_timer_.cancel();
        for (auto& [due, one] : std::exchange(delayed_, {})) one.pending.refuse(kStoppedText);
        topology_->stop(kStoppedText);
        // Not at once: what the closed sockets still have to say refers to them.
        asio::post(shared_.io, [this] { shared_.io.stop(); });
    }

    Shared shared_;
    std::unique_ptr<Topology> topology_;
    std::multimap<SteadyTime, Delayed> delayed_;
    asio::steady_timer retry_timer_{shared_.io};
    asio::steady_timer tick_timer_{shared_.io};
    SteadyTime last_tick_{};
    std::vector<Submission> draining_;
    std::promise<std::optional<base::Error>> opened_;
    std::thread thread_;
    std::thread::id io_thread_;  // stays after the join
    std::mutex stop_mutex_;

    std::mutex inbox_mutex_;  // guards:
    std::vector<Submission> inbox_;
    bool awake_ = false;  // a drain is on its way
    bool stopped_ = false;

    mutable std::mutex published_mutex_;  // guards:
    std::vector<Node> masters_;
    std::optional<base::Error> problem_;

    std::atomic<bool> answering_{false};
    std::atomic<SteadyTime::rep> answering_since_{0};
    std::atomic<std::int64_t> clock_offset_us_{0};
};

}  // namespace

base::Result<std::unique_ptr<Client>> Client::connect(ClientOptions options) {
    const Target& target = options.target;
    const auto invalid = [](const char* why) {
        return base::Error{.code = base::ErrorCode::invalid_argument, .detail = why};
    };
    if (options.cluster && target.kind != Target::Kind::server)
        return invalid(
            "`cluster: true` wants a redis:// or rediss:// URL of one of the Cluster's nodes");
    if (options.cluster && target.database != 0)
        return invalid("a Redis Cluster has database 0 only: remove the database from the URL");
    auto client = std::make_unique<RedisClient>(std::move(options));
    auto opened = client->open();
    if (!opened) return opened.error();
    return std::unique_ptr<Client>(std::move(client));
}

}  // namespace semel::stores::redis
