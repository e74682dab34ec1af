// One question to whichever of several servers answers it first: who is the master, who holds which
// slots.
#pragma once

#include <functional>
#include <optional>

#include "stores/redis/link.hpp"

namespace semel::stores::redis {

/// Asks one server after the other, each on a connection of its own that is closed again. On the
/// client's thread.
class Query final : public std::enable_shared_from_this<Query>, Link::User {
  public:
    struct Question {
        std::vector<Place> places;
        std::shared_ptr<asio::ssl::context> tls;
        std::string user, password;
        std::vector<std::string> words;
        milliseconds limit{};  ///< For each server: to connect, and again to answer.
    };
    /// Looks at an answer (never an error reply of AUTH). Nothing: it suits, ask no further. Else
    /// why it does not.
    using Judge = std::function<std::optional<base::Error>(const Place&, const Reply&)>;
    /// Nothing: one suited. Else the most telling of the errors. Called once, unless cancelled
    /// before.
    using Done = std::function<void(std::optional<base::Error>)>;

    Query(asio::io_context& io, Question question, Judge judge, Done done);
    void start();
    /// Neither `judge` nor `done` is called any more. Idempotent.
    void cancel();

  private:
    void next();
    void failed(base::Error why);
    void finish(std::optional<base::Error> why);
    void link_opened() override;
    void link_heard() override {}
    void link_received(Reply&& reply) override;
    void link_read() override {}
    void link_written() override {}
    void link_broken(base::Error why) override;

    asio::io_context& io_;
    Question question_;
    Judge judge_;
    Done done_;
    asio::steady_timer timer_;
    std::shared_ptr<Link> link_;
    std::size_t at_ = 0;
    bool authenticating_ = false;
    std::optional<base::Error> worst_;
};

}  // namespace semel::stores::redis
