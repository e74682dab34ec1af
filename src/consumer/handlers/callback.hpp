// The handler `callback`: the user's C++ function, on threads of its own.
#pragma once

#include <functional>
#include <memory>

#include "consumer/handler.hpp"
#include "runtime/loop.hpp"

namespace semel::consumer {

/// Called on one of `threads` threads, several at once. An exception counts as HandledFailed with
/// its what().
using CallbackFunction =
    std::function<HandlerOutcome(const Message& message, const Attempt& attempt)>;
std::unique_ptr<Handler> make_callback_handler(CallbackFunction function, unsigned threads);

}  // namespace semel::consumer
