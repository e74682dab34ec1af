// From the functions of <semel/semel.hpp> to those that consumers take.
#pragma once

#include "consumer/handlers/callback.hpp"
#include "consumer/strategies/transaction.hpp"
#include "semel/semel.hpp"

namespace semel::library {

consumer::CallbackFunction callback_of(Handler handler);
consumer::TransactionCallback callback_of(TransactionHandler handler, bool batchable);

}  // namespace semel::library
