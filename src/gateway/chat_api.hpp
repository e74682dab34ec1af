// /api/chat: one object in, one object out; conversations kept; the state of a request can be asked
// for.
#pragma once

#include "gateway/follower.hpp"
#include "gateway/owner.hpp"

namespace semel::gateway {

/// History sent with a turn: the newest turns of the session, at most this many, and together at
/// most this many bytes of text; a turn is taken whole or not at all. Stated in
/// docs/reference/chat-api.md.
inline constexpr std::uint32_t history_turns_max = 100;
inline constexpr std::size_t history_max_bytes = 96 * 1024;
/// Of `content` and of a whole request.
inline constexpr std::uint64_t chat_body_max_bytes = 1024 * 1024;

class ChatApi {
  public:
    ChatApi(Process::State& state, engine::Engine& engine, http::Client& client)
        : state_(state), engine_(engine), owner_(state, engine, client), follower_(state, engine) {}

    /// Any request whose path is /api/chat or below it.
    Task<> handle(http::Exchange& exchange, const Caller& caller);

  private:
    struct Question;
    Task<> ask(http::Exchange& exchange, const Caller& caller, std::string user);
    Task<> status(http::Exchange& exchange, const Caller& caller, std::string user,
                  std::string request_id);
    Task<> session(http::Exchange& exchange, const Caller& caller, std::string user,
                   std::string session);
    Task<> messages(http::Exchange& exchange, const Caller& caller, std::string user,
                    std::string session);
    Task<> forget(http::Exchange& exchange, const Caller& caller, std::string user,
                  std::string session);
    /// The owner of a turn: takes the session's turn first, reads the history, gives the turn back
    /// at the end.
    Task<> own_turn(FlightPtr flight, std::shared_ptr<Question> question);
    /// Null: the flight has ended. Nullopt: meanwhile there is a record that needs no turn.
    Task<std::optional<std::unique_ptr<engine::LeaseGuard>>> take_turn(FlightPtr flight,
                                                                       const Question& question);
    [[nodiscard]] bool needs_no_turn(const core::RecordPtr& record, const Question& question) const;
    [[nodiscard]] bool runs_elsewhere(const core::RecordPtr& record,
                                      const Question& question) const;

    Process::State& state_;
    engine::Engine& engine_;
    Owner owner_;
    Follower follower_;
};

}  // namespace semel::gateway
