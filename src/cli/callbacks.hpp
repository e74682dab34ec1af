// Callbacks: the functions that a program brings for its consumers.
#pragma once

#include <map>
#include <string>

#include "consumer/handlers/callback.hpp"
#include "consumer/strategies/transaction.hpp"

namespace semel::cli {

/// By the name of their consumer, whose configuration says `handler: callback`.
struct Callbacks {
    std::map<std::string, consumer::CallbackFunction> functions;        ///< store, table
    std::map<std::string, consumer::TransactionCallback> transactions;  ///< transaction
};

}  // namespace semel::cli
