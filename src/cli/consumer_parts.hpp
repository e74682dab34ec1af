// What one consumer is made of: its source, strategy, handler, records and letters, each on its own
// loop.
#pragma once

#include <chrono>
#include <memory>

#include "cli/consumers.hpp"
#include "cli/loop_thread.hpp"
#include "consumer/consumer.hpp"
#include "consumer/handler.hpp"
#include "consumer/observer.hpp"
#include "consumer/records.hpp"
#include "consumer/results.hpp"
#include "http/client.hpp"

namespace semel::cli {

/// In the order in which they use each other: the last one first to go.
struct ConsumerParts {
    ConsumerParts() = default;
    /// The publisher's thread tells the consumer what it meets: it ends first.
    ~ConsumerParts() {
        if (publisher) publisher->stop({});
    }
    ConsumerParts(const ConsumerParts&) = delete;
    ConsumerParts& operator=(const ConsumerParts&) = delete;

    LoopThread thread;
    std::unique_ptr<http::Client> client;
    std::unique_ptr<consumer::Records> records;
    std::unique_ptr<consumer::Handler> handler;
    std::unique_ptr<brokers::Publisher> publisher;
    std::unique_ptr<consumer::Results> results;  ///< Null: what handlers answer is dropped.
    std::unique_ptr<deadletter::Outlet> outlet;
    std::unique_ptr<consumer::CopyOutlet> copies;  ///< Null: failed messages do not wait there.
    std::unique_ptr<consumer::Parking> parking;    ///< Null: nor beside the records.
    std::unique_ptr<consumer::Strategy> strategy;
    std::unique_ptr<brokers::Source> source;
    std::unique_ptr<consumer::Runner> consumer;
};

/// What is counted of one consumer, whichever way it runs.
struct CountersOfOne {
    consumer::ConsumerCounters consumer;
    consumer::ObserverCounters observer;
};

/// Makes them as `config` says; nothing runs yet. `retention`: of a message that is done.
/// `counters` and `around` outlive them. Who observes has a source and an observer, and no more.
/// Error: a sentence; it can never run like this.
base::Result<std::unique_ptr<ConsumerParts>> make_parts(const ConsumersAround& around,
                                                        const config::ConsumerConfig& config,
                                                        std::chrono::milliseconds retention,
                                                        CountersOfOne& counters);

}  // namespace semel::cli
