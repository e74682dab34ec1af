// Producer: the Publisher on librdkafka, idempotent. A thread of its own serves the confirmations.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "brokers/kafka/handles.hpp"

namespace semel::brokers::kafka {

class Producer final : public Publisher {
  public:
    explicit Producer(PublisherConfig config) : config_(std::move(config)) {}
    ~Producer() override;
    /// Makes the client; once, before anything else.
    base::Result<void> open();

    void publish(Outgoing message, PublishDone done) override;
    bool flush(std::chrono::milliseconds within) override;
    void stop(std::chrono::milliseconds within) override;

  private:
    struct Pending {
        Producer* producer;
        PublishDone done;
        std::string topic;
    };

    base::Result<Client> make();
    void run();
    void renew();
    void decided();
    void purge(rd_kafka_t* client);
    static void on_report(rd_kafka_t* client, const rd_kafka_message_t* message, void* opaque);

    const PublisherConfig config_;
    std::shared_mutex client_mutex_;  ///< Unique only to replace the client.
    Client client_;
    std::thread thread_;
    std::atomic<bool> stopping_{false};
    std::atomic<bool> ended_{false};
    std::mutex pending_mutex_;
    std::condition_variable all_decided_;
    std::size_t pending_ = 0;
    std::mutex stop_mutex_;
};

}  // namespace semel::brokers::kafka
