// What an error number of the server or of the client library means for a store. Never by the text:
// it may be in any language.
#pragma once

#include <cstddef>
#include <string>

#include "sql/session.hpp"

namespace semel::stores::mysql {

/// A statement that failed: which of those sent together, and why.
struct Failure {
    unsigned number = 0;  ///< Of the server (1000 ...) or of the client library (2000 ...).
    std::size_t statement = 0;
};

/// The meaning of an error number while statements run.
sql::Trouble trouble_of(unsigned number);

/// The Problem of a statement. `sent`: the server may have read all of it; what was lost then may
/// have been done. The detail names the number and, where it is one that people meet, says what it
/// means and what to do; it holds nothing of the statement.
sql::Problem problem_of(unsigned number, bool sent);

/// The same while a connection is made to `where` for `user` and `database`. `text`: the server's
/// own words.
sql::Problem connect_problem(unsigned number, const std::string& text, const std::string& where,
                             const std::string& user, const std::string& database);

/// What a session finds on a server that must not be written to.
sql::Problem not_writable(std::string detail);

}  // namespace semel::stores::mysql
