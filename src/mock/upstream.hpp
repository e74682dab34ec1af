// Upstream: a pretended AI API of the OpenAI dialect. The model's name says how it behaves; nothing
// is random.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "http/exchange.hpp"
#include "mock/calls.hpp"
#include "mock/script.hpp"
#include "runtime/loop.hpp"

namespace semel::mock {

using std::chrono::milliseconds;

/// What a model does whose name says nothing else.
struct Defaults {
    milliseconds latency{0};   ///< Before the head of an answer.
    milliseconds gap{0};       ///< Between two events of a stream.
    std::uint32_t length = 5;  ///< Events of a stream.
};

/// How one call is answered, read from the model's name (docs/reference/mock-upstream.md).
struct Behaviour {
    enum class Kind {
        normal,
        error,
        cut,
        error_event,
        no_terminator,
        close_after_read,
        stall,
        short_body
    };
    Kind kind = Kind::normal;
    milliseconds latency{0};
    milliseconds gap{0};
    std::uint32_t events = 5;
    int status = 500;                 ///< error
    std::uint64_t content_bytes = 0;  ///< big: size of the answer's text; 0: the usual sentence.
    std::uint64_t failures = 0;       ///< fail-N-then-ok-STATUS: so many calls get `status`.
};
Behaviour behaviour_of(std::string_view model, const Defaults& defaults);

/// What several loops share. Thread-safe.
struct State {
    Calls calls;
    Scripts scripts;
};

/// For one loop. `loop` and `state` must outlive it.
class Upstream final : public http::Handler {
  public:
    Upstream(runtime::Loop& loop, State& state, Defaults defaults)
        : loop_(loop), state_(state), defaults_(defaults) {}
    http::Task<> handle(http::Exchange& exchange) override;

  private:
    struct Call {
        std::string model;
        std::uint64_t number = 0;
        std::uint64_t prompt_tokens = 0;
        bool stream = false;
        bool include_usage = false;
    };

    http::Task<> completion(http::Exchange& exchange);
    http::Task<> plain(http::Exchange& exchange, const Call& call, const Behaviour& behaviour);
    http::Task<> stream(http::Exchange& exchange, const Call& call, const Behaviour& behaviour);
    http::Task<> scripted(http::Exchange& exchange, std::shared_ptr<const Script> script,
                          std::uint64_t number);
    http::Task<> upload(http::Exchange& exchange);
    http::Task<> download(http::Exchange& exchange, std::uint64_t bytes);
    http::Task<> control(http::Exchange& exchange);
    /// Says nothing more until the client is gone, then breaks off.
    http::Task<> stall(http::Exchange& exchange);

    runtime::Loop& loop_;
    State& state_;
    Defaults defaults_;
};

}  // namespace semel::mock
