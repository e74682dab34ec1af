// The connection to one data server: kept, made ready (user, database, scripts), pipelined,
// watched.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <random>

#include "stores/redis/link.hpp"
#include "stores/redis/pending.hpp"

namespace semel::stores::redis {

/// What all connections of a client share. Counters are read by other threads.
struct Shared {
    asio::io_context io{1};
    ClientOptions options;
    std::shared_ptr<asio::ssl::context> tls;  ///< Null without TLS.
    std::mt19937 random{std::random_device{}()};
    std::atomic<std::uint64_t> connections{0};
    std::atomic<std::uint64_t> scripts_resent{0};
    std::atomic<std::uint64_t> redirections{0};
    std::atomic<std::uint64_t> lost_replies{0};
    std::atomic<std::uint64_t> not_replicated{0};

    /// A delay that doubles from `first` to `most` with each of `tries`, of which a random half is
    /// left out.
    milliseconds backoff(milliseconds first, milliseconds most, unsigned tries);
};

/// All on the client's thread. Commands that it cannot bring to an answer itself go back to its
/// host.
class Connection final : public std::enable_shared_from_this<Connection>, Link::User {
  public:
    class Host {
      public:
        /// Asked before each attempt to connect: answer with open_at() or cannot_open(), now or
        /// later.
        virtual void locate(Connection& connection) = 0;
        virtual void connection_ready(Connection& connection) = 0;
        /// An attempt failed, or the connection broke. waiting() may be taken. It tries again by
        /// itself.
        virtual void connection_lost(Connection& connection, const base::Error& why) = 0;
        /// The server answers again after a second of silence. Before any of those answers is
        /// given.
        virtual void connection_woke(Connection& connection) = 0;
        virtual void clock_offset(std::int64_t us) = 0;
        /// An error reply (but NOSCRIPT) to a command that somebody still waits for.
        virtual void command_refused(Connection& connection, Pending pending,
                                     const Reply& error) = 0;

      protected:
        ~Host() = default;
    };

    Connection(Shared& shared, Host& host, std::string name, bool must_be_master);

    /// The first attempt, at once.
    void start();
    void open_at(Place place);
    void cannot_open(base::Error why);

    void enqueue(Pending pending) {
        waiting_.push_back(std::move(pending));
        used_ = true;
    }
    /// Sends what waits, unless something is being sent.
    void flush();
    /// Expires, asks for the TIME, gives up a silent server.
    void tick(SteadyTime now);
    /// Sends nothing more; once everything sent is answered (or a second of silence), connects
    /// anew: the host locates the server.
    void leave();
    /// Breaks the connection. What was sent goes back to waiting() if it is repeatable, else it is
    /// unknown.
    void lose(base::Error why);
    /// Answers everything and closes for good.
    void close(const std::string& why);

    /// Commands not sent, to be handed on.
    std::deque<Pending> take_waiting() { return std::exchange(waiting_, {}); }
    [[nodiscard]] const std::string& name() const { return name_; }
    [[nodiscard]] bool ready() const { return state_ == State::ready; }
    /// Nobody waits for anything of it.
    [[nodiscard]] bool quiet() const;
    /// When it was made, or (by tick()) last had a command to send.
    [[nodiscard]] SteadyTime last_used() const { return last_used_; }
    /// How long something sent has had no answer.
    [[nodiscard]] milliseconds silence(SteadyTime now) const;
    /// Why it is not ready, or silent; nothing if all is well.
    [[nodiscard]] std::optional<base::Error> problem(SteadyTime now) const;
    /// The server that is connected, or was last.
    [[nodiscard]] const Place& place() const { return place_; }
    void rename(std::string name) { name_ = std::move(name); }

  private:
    enum class State { down, locating, opening, setup, ready, closed };
    enum class Step { auth, cluster, role, select, script, time };
    struct Held {
        Pending pending;
        Reply reply;
    };

    void link_opened() override;
    void link_heard() override;
    void link_received(Reply&& reply) override;
    void link_read() override;
    void link_written() override;
    void link_broken(base::Error why) override;

    void set_up(const Reply& reply);
    void set_up_clock();
    [[nodiscard]] std::optional<base::Error> setup_problem(Step step, const Reply& reply) const;
    void become_ready();
    void ask_time();
    void heard_time(const Reply& reply);
    void replicated(const Reply& reply);
    void reconnect_later();
    void leave_if_done(bool at_once);
    [[nodiscard]] std::string lost_sentence(const Pending& pending, const std::string& why) const;

    Shared& shared_;
    Host& host_;
    std::string name_;
    bool must_be_master_;
    State state_ = State::down;
    Place place_;
    std::shared_ptr<Link> link_;
    asio::steady_timer timer_;  // back-off while down, limit while setting up
    unsigned failures_ = 0;     // attempts in a row
    base::Error problem_{};
    std::deque<Step> steps_;
    bool writing_ = false;
    bool leaving_ = false;

    std::deque<Pending> waiting_;
    std::deque<Pending> sent_;
    std::deque<Held> held_;  // replied, but not yet confirmed by WAIT
    bool used_ = false;
    SteadyTime last_used_;
    SteadyTime expecting_since_{};
    SteadyTime asked_time_{};
    bool time_due_ = false;
    bool time_asked_ = false;
};

}  // namespace semel::stores::redis
