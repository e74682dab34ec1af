// What a consumer's configuration promises, and whether its broker and database are ready for it:
// for the start of `serve`, and for `doctor`.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "cli/callbacks.hpp"
#include "cli/cli.hpp"

namespace semel::cli {

/// Consumers whose record of a message lies in the configured store.
bool keeps_records_in_store(const config::ConsumerConfig& consumer);
/// A store that is not shared keeps the records of this consumer, and nobody has accepted that for
/// more than one process: its group may have one member only.
bool needs_group_of_one(const config::ConsumerConfig& consumer, const config::Config& config);

/// What can be said against the consumers without asking anybody: properties of their broker's
/// library, statements, names of tables. Error invalid_argument: a sentence that begins with
/// FILE:LINE.
base::Result<void> check_consumers(const config::Config& config, const std::string& file,
                                   const Leaves& leaves);

/// Whether each function that the configuration says `callback` for is there, under the name of its
/// consumer, and of the kind that its strategy takes. Error invalid_argument: a sentence.
base::Result<void> check_callbacks(const config::Config& config, const std::string& file,
                                   const Callbacks& callbacks);

/// Where its messages come from: "kafka orders (group shop)". Without credentials.
std::string source_in_words(const config::ConsumerConfig& consumer);
std::string strategy_in_words(const config::ConsumerConfig& consumer);
/// How often a message runs before it is given up, and when.
std::string runs_in_words(const config::RetryConfig& retry);
/// What a strategy promises, as far as the configuration alone says it.
std::string promise_in_words(const config::ConsumerConfig& consumer, const config::Config& config);

struct Outlook {
    std::vector<std::string> good;
    std::vector<std::string> notes;  ///< What somebody should read.
    std::vector<std::string> wrong;  ///< Why it must not start.
    std::vector<std::string>
        away;  ///< What cannot be asked at the moment; nothing else is known then.
    std::chrono::milliseconds retention{0};  ///< Of a message that is done.
};

/// Asks the broker and the database. Blocks, some seconds for each that is away. `make`: what is
/// missing and may be made is made: the target of letters (create), the inbox's tables (migrate).
Outlook look_at_consumer(const config::ConsumerConfig& consumer, const std::string& file,
                         const Leaves& leaves, bool make);

}  // namespace semel::cli
