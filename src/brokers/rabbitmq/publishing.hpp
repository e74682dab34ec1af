// Publishing: the Publisher on one connection with publisher confirms and mandatory messages.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "brokers/rabbitmq/connection.hpp"

namespace semel::brokers::rabbitmq {

class Publishing final : public Publisher {
  public:
    Publishing(PublisherConfig config, Endpoint endpoint);
    ~Publishing() override;

    void publish(Outgoing message, PublishDone done) override;
    bool flush(std::chrono::milliseconds within) override;
    void on_problem(std::function<void(const Problem&)> told) override;
    void stop(std::chrono::milliseconds within) override;

  private:
    using Clock = std::chrono::steady_clock;
    struct Item {
        Outgoing message;
        PublishDone done;
        base::SteadyTime deadline;
        std::string returned;  ///< Why the broker sent it back; empty: it did not.
    };

    // ---- the I/O thread
    void run();
    void connect();
    void send();
    bool send(const Item& item);
    void read();
    bool on_frame(const amqp_frame_t& frame);
    bool on_return(const amqp_basic_return_t& said);
    void on_confirm(std::uint64_t tag, bool multiple, bool confirmed);
    void expire();
    /// The connection is gone: what was sent and not confirmed is in doubt.
    void lose(const std::string& why);
    void finish(Item item, base::Result<PublishedAt> result);
    void fail(Item item, base::ErrorCode code, base::Applied applied, const std::string& why);
    void tell(ProblemKind kind, const std::string& text);

    const PublisherConfig config_;
    Connection connection_;
    Mailbox mailbox_;
    std::thread thread_;
    std::mutex stop_mutex_;

    std::mutex mutex_;  ///< Guards the four below.
    std::condition_variable all_decided_;
    std::deque<Item> incoming_;
    std::size_t undecided_ = 0;
    bool stopping_ = false;
    bool ended_ = false;

    // The I/O thread's.
    std::function<void(const Problem&)> problem_;
    std::deque<Item> queue_;              ///< Not sent.
    std::map<std::uint64_t, Item> sent_;  ///< By delivery tag; not confirmed.
    std::uint64_t last_tag_ = 0;
    Backoff backoff_;
    base::SteadyTime next_try_{};
    bool blocked_ = false;
    bool reachable_ = true;
    std::string last_problem_;
};

}  // namespace semel::brokers::rabbitmq
