// Follower: gives one client the answer of its intent: live from a flight, or from the record, or
// says why not.
#pragma once

#include <string>

#include "gateway/owner.hpp"
#include "http/exchange.hpp"

namespace semel::gateway {

/// One client's question, as its follower carries it.
struct Asked {
    http::Exchange& exchange;
    core::StoredKey key;
    core::Fingerprint fingerprint;
    const config::RouteConfig* route = nullptr;
    Shape shape = Shape::openai;
    std::string id;            ///< As the client sent it; valid header text.
    std::string_view body;     ///< To name the fields that differ.
    SteadyTime wait_until;     ///< A joiner is told to come again by then.
    bool chat = false;         ///< /api/chat: `fromCache`, 202 bodies.
    bool as_recorded = false;  ///< `fromCache` stays false.
    std::string status_path;   ///< /api/chat: where the state can be asked.
    telemetry::Route metrics_route = telemetry::Route::chat_completions;
};

class Follower {
  public:
    Follower(Process::State& state, engine::Engine& engine) : state_(state), engine_(engine) {}

    enum class Followed {
        answered,  ///< The client has its answer, or is gone.
        again,     ///< The flight says nothing about this client's question: look again.
    };
    Task<Followed> follow(Asked& asked, FlightPtr flight, bool leads);
    /// From the record, after checking that it is the same request.
    Task<> replay(Asked& asked, core::RecordPtr record);
    Task<> answer_problem(Asked& asked, Problem problem, telemetry::RequestOutcome outcome);

  private:
    struct Marks {
        std::string_view outcome;
        bool replayed = false;
        std::uint32_t attempt = 0;
        core::StoreTime expires;
        bool pending = false;
    };
    Task<> mismatch(Asked& asked, std::vector<std::uint64_t> fields);
    Task<> still_running(Asked& asked, FlightPtr flight);
    Task<Followed> refusal(Asked& asked, FlightPtr flight, bool same);
    Task<> send_whole(Asked& asked, FlightPtr flight, bool leads);
    Task<Followed> send_stream(Asked& asked, FlightPtr flight, bool leads);
    Task<> replay_chunks(Asked& asked, core::RecordPtr record, http::ResponseHead head);
    [[nodiscard]] http::ResponseHead response_head(const Asked& asked, int status,
                                                   std::string_view content_type,
                                                   const Marks& marks) const;
    void count(const Asked& asked, telemetry::RequestOutcome outcome) {
        state_.metrics.requests(asked.metrics_route, outcome).add();
    }

    Process::State& state_;
    engine::Engine& engine_;
};

/// RFC 3339, UTC, whole seconds.
std::string rfc3339(core::StoreTime time);

/// On /api/chat the only byte difference between a first answer and a later one:
/// `"fromCache":false` becomes true. Finds the one that we wrote (content cannot hold it: quotes
/// inside a JSON string are escaped).
std::string mark_from_cache(std::string_view body);

}  // namespace semel::gateway
