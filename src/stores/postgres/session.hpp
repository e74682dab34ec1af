// sql::Session on PostgreSQL.
#pragma once

#include <memory>
#include <vector>

#include "sql/session.hpp"
#include "stores/postgres/connection.hpp"
#include "stores/postgres/statements.hpp"

namespace semel::stores::postgres {

/// A session on a connection whose server is a primary and whose tables have the version this
/// binary knows: the caller has looked.
std::unique_ptr<sql::Session> make_session(std::unique_ptr<Connection> connection,
                                           std::shared_ptr<const Statements> statements);

/// Every statement of a session, on a record, a conversation, a chunk and a value that nobody else
/// has: for a trial that is rolled back.
std::vector<Step> trial_of(const Statements& statements);

}  // namespace semel::stores::postgres
