// Two gateway processes in one program: one memory store, loops on their own threads, and real
// sockets between them.
#include <gtest/gtest.h>

#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "gateway/gateway.hpp"
#include "gateway/peer_server.hpp"
#include "http/client.hpp"
#include "http/server.hpp"
#include "sim/fake_exchange.hpp"
#include "stores/memory/memory_store.hpp"

namespace semel {
namespace {

using runtime::Task;
using sim::FakeExchange;
using sim::FakeRequest;
using sim::Received;
using namespace std::chrono_literals;

constexpr auto patience = 60s;
constexpr auto lease = 3s;

/// A loop on a thread of its own, until it is destroyed.
class LoopThread {
  public:
    LoopThread()
        : loop(base::system_clocks()),
          guard_(loop.executor()),
          thread_([this] { loop.io().run(); }) {}
    ~LoopThread() { stop(); }
    /// Nothing runs there any more; the loop itself still exists.
    void stop() {
        if (!thread_.joinable()) return;
        guard_.reset();
        loop.io().stop();
        thread_.join();
    }
    LoopThread(const LoopThread&) = delete;
    LoopThread& operator=(const LoopThread&) = delete;

    /// Runs `fn` there and waits for its result.
    template <class Fn>
    auto on(Fn fn) {
        std::packaged_task<decltype(fn())()> task(std::move(fn));
        auto result = task.get_future();
        loop.post([&task] { task(); });
        return result.get();
    }
    runtime::Loop loop;

  private:
    runtime::asio::executor_work_guard<runtime::Executor> guard_;
    std::thread thread_;
};

/// Lets upstream and test wait for each other.
class Steps {
  public:
    void allow(int step) {
        const std::lock_guard lock(mutex_);
        allowed_ = step;
        changed_.notify();
    }
    Task<> wait(runtime::Loop& loop, int step) {
        for (;;) {
            const auto seen = changed_.version();
            {
                const std::lock_guard lock(mutex_);
                if (allowed_ >= step) co_return;
            }
            co_await changed_.wait(loop, seen, base::SteadyTime::max());
        }
    }

  private:
    std::mutex mutex_;
    int allowed_ = 0;  // guarded by mutex_
    runtime::Signal changed_;
};

std::string event(int i) {
    return "data: {\"model\":\"m\",\"choices\":[{\"delta\":{\"content\":\"" + std::to_string(i) +
           "\"}}]}\n\n";
}

/// The paid API: a stream whose events leave as the test allows.
class Upstream final : public http::Handler {
  public:
    static constexpr int events = 20;
    explicit Upstream(runtime::Loop& loop) : loop_(loop) {}
    Task<> handle(http::Exchange& exchange) override {
        ++calls;
        std::string body;
        co_await exchange.read_body(body, 1 << 20);
        http::ResponseHead head;
        head.add("Content-Type", "text/event-stream");
        exchange.begin(head);
        for (int i = 0; i < events; ++i) {
            co_await steps.wait(loop_, i + 1);
            const std::string bytes = event(i);
            if (!co_await exchange.write(bytes)) co_return;
        }
        co_await steps.wait(loop_, events + 1);
        co_await exchange.finish("data: [DONE]\n\n");
    }
    static std::string whole() {
        std::string all;
        for (int i = 0; i < events; ++i) all += event(i);
        return all + "data: [DONE]\n\n";
    }
    std::atomic<int> calls{0};
    Steps steps;

  private:
    runtime::Loop& loop_;
};

/// One gateway process: a loop for its clients, one for its peers.
class Gateway {
  public:
    Gateway(std::string id, core::Store& store, const config::Config& config)
        : shared_(config, "secret", hot_, metrics, "/tmp", "peer secret") {
        peers_ = std::make_unique<gateway::PeerServer>(shared_, peer_thread.loop, lease);
        auto listening = peer_thread.on([this] {
            return http::Server::listen(peer_thread.loop, "127.0.0.1", 0, *peers_, {}, peer_counters,
                                        false);
        });
        server = std::move(*listening);
        engine::EngineOptions options;
        options.owner = {std::move(id), "127.0.0.1:" + std::to_string(server->port())};
        options.lease = lease;
        options.acquire_patience = lease / 2;
        thread.on([&] {
            engine_ = std::make_unique<engine::Engine>(thread.loop, store, options, hot_, *spool_,
                                                       counters_);
            client_ = http::make_client(thread.loop);
            gateway_ = std::make_unique<gateway::Gateway>(shared_, *engine_, *client_);
        });
    }

    /// Whoever asked has been answered.
    ~Gateway() {
        peer_thread.on([this] { server->close(); });
        thread.stop();
        peer_thread.stop();
    }
    Gateway(const Gateway&) = delete;
    Gateway& operator=(const Gateway&) = delete;

    struct Asking {
        std::shared_ptr<FakeExchange> exchange;
        std::shared_ptr<std::promise<Received>> done = std::make_shared<std::promise<Received>>();
        std::future<Received> result = done->get_future();
    };
    Asking ask(const std::string& key) {
        Asking asking;
        thread.on([&] {
            asking.exchange = std::make_shared<FakeExchange>(
                thread.loop,
                FakeRequest{.headers = {{"Host", "localhost"},
                                        {"Content-Type", "application/json"},
                                        {"Idempotency-Key", key}},
                            .body = R"({"model":"m","stream":true})"});
            thread.loop.spawn(serve(gateway_.get(), asking.exchange, asking.done));
        });
        return asking;
    }
    /// Waits until the client has these bytes so far.
    bool has(const Asking& asking, const std::string& body) {
        const auto until = std::chrono::steady_clock::now() + patience;
        while (std::chrono::steady_clock::now() < until) {
            if (thread.on([&] { return asking.exchange->received().body == body; })) return true;
            std::this_thread::yield();
        }
        return false;
    }
    void close_peers() {
        peer_thread.on([this] { server->close(); });
    }
    static Received wait(Asking& asking) {
        if (asking.result.wait_for(patience) != std::future_status::ready) return {};
        return asking.result.get();
    }

    // First: sockets and timers of the others are of these loops.
    LoopThread peer_thread;
    LoopThread thread;
    telemetry::Metrics metrics;
    http::ServerCounters peer_counters;
    std::unique_ptr<http::Server> server;

  private:
    static Task<> serve(gateway::Gateway* gateway, std::shared_ptr<FakeExchange> exchange,
                        std::shared_ptr<std::promise<Received>> done) {
        co_await gateway->handle(*exchange);
        done->set_value(exchange->received());
    }

    engine::HotRecords hot_{1 << 20};
    std::unique_ptr<engine::Spool> spool_ = std::move(*engine::Spool::open(""));
    engine::EngineCounters counters_;
    gateway::Process shared_;
    std::unique_ptr<gateway::PeerServer> peers_;
    std::unique_ptr<engine::Engine> engine_;
    std::unique_ptr<http::Client> client_;
    std::unique_ptr<gateway::Gateway> gateway_;
};

class Peers : public testing::Test {
  protected:
    Peers() : upstream_(upstream_thread_.loop) {
        auto listening = upstream_thread_.on([this] {
            return http::Server::listen(upstream_thread_.loop, "127.0.0.1", 0, upstream_, {},
                                        upstream_counters_, false);
        });
        upstream_server_ = std::move(*listening);
        config_.upstreams.push_back(
            {.name = "u",
             .base_url = "http://127.0.0.1:" + std::to_string(upstream_server_->port()),
             .models = {"*"}});
        config_.routes["/v1/chat/completions"] = {};
        config_.routes["/api/chat"] = {};
        first_ = std::make_unique<Gateway>("first", *store_, config_);
        second_ = std::make_unique<Gateway>("second", *store_, config_);
    }
    ~Peers() override {
        second_.reset();
        first_.reset();
        upstream_thread_.on([this] { upstream_server_->close(); });
        upstream_thread_.stop();
    }

    std::string first_events(int n) {
        std::string all;
        for (int i = 0; i < n; ++i) all += event(i);
        return all;
    }

    config::Config config_;
    std::unique_ptr<core::Store> store_ = stores::make_memory_store(base::system_clocks());
    http::ServerCounters upstream_counters_;
    LoopThread upstream_thread_;
    Upstream upstream_;
    std::unique_ptr<http::Server> upstream_server_;
    std::unique_ptr<Gateway> first_;
    std::unique_ptr<Gateway> second_;
};

TEST_F(Peers, a_thousand_joiners_in_another_process_follow_a_stream_over_one_connection) {
    upstream_.steps.allow(3);
    auto owner = first_->ask("k");
    ASSERT_TRUE(first_->has(owner, first_events(3)));
    std::vector<Gateway::Asking> elsewhere;
    for (int i = 0; i < 1000; ++i) elsewhere.push_back(second_->ask("k"));
    for (int step = 3; step <= Upstream::events; ++step) {
        upstream_.steps.allow(step);
        ASSERT_TRUE(second_->has(elsewhere.front(), first_events(step))) << "each event as it comes";
        ASSERT_TRUE(second_->has(elsewhere.back(), first_events(step)));
    }
    upstream_.steps.allow(Upstream::events + 1);
    for (auto& joiner : elsewhere) {
        const Received got = Gateway::wait(joiner);
        ASSERT_EQ(got.state, Received::State::finished);
        ASSERT_EQ(got.body, Upstream::whole());
        ASSERT_EQ(got.header("Semel-Outcome"), "joined");
        ASSERT_EQ(got.header("Semel-Attempt"), "1");
    }
    EXPECT_EQ(Gateway::wait(owner).body, Upstream::whole());
    EXPECT_EQ(first_->peer_counters.connections, 1u);
    EXPECT_EQ(second_->metrics.peer_follows.value(), 1u);
    EXPECT_EQ(upstream_.calls, 1);
}

TEST_F(Peers, an_owner_whose_peer_address_closes_in_mid_stream_is_continued_from_its_record) {
    upstream_.steps.allow(5);
    auto owner = first_->ask("k");
    ASSERT_TRUE(first_->has(owner, first_events(5)));
    auto elsewhere = second_->ask("k");
    ASSERT_TRUE(second_->has(elsewhere, first_events(5)));
    first_->close_peers();
    upstream_.steps.allow(Upstream::events + 1);
    EXPECT_EQ(Gateway::wait(owner).body, Upstream::whole());
    const Received got = Gateway::wait(elsewhere);
    EXPECT_EQ(got.state, Received::State::finished);
    EXPECT_EQ(got.body, Upstream::whole());
    EXPECT_EQ(upstream_.calls, 1);
    EXPECT_EQ(second_->metrics.peer_fallbacks.value(), 1u);
}

TEST_F(Peers, an_owner_that_nobody_can_connect_to_is_replayed) {
    first_->close_peers();
    upstream_.steps.allow(5);
    auto owner = first_->ask("k");
    ASSERT_TRUE(first_->has(owner, first_events(5)));
    auto elsewhere = second_->ask("k");
    upstream_.steps.allow(Upstream::events + 1);
    EXPECT_EQ(Gateway::wait(owner).body, Upstream::whole());
    const Received got = Gateway::wait(elsewhere);
    EXPECT_EQ(got.body, Upstream::whole());
    EXPECT_EQ(got.header("Semel-Outcome"), "replayed");
    EXPECT_EQ(upstream_.calls, 1);
}

TEST_F(Peers, many_intents_are_followed_both_ways_at_once) {
    upstream_.steps.allow(Upstream::events);
    std::vector<Gateway::Asking> all;
    for (int i = 0; i < 50; ++i) {
        const std::string key = "k" + std::to_string(i);
        Gateway& one = i % 2 == 0 ? *first_ : *second_;
        Gateway& other = i % 2 == 0 ? *second_ : *first_;
        all.push_back(one.ask(key));
        all.push_back(other.ask(key));
        all.push_back(other.ask(key));
    }
    upstream_.steps.allow(Upstream::events + 1);
    for (auto& asking : all) EXPECT_EQ(Gateway::wait(asking).body, Upstream::whole());
    EXPECT_EQ(upstream_.calls, 50);
}

}  // namespace
}  // namespace semel
