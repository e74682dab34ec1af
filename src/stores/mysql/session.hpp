// sql::Session on a MySQL or MariaDB connection.
#pragma once

#include <memory>

#include "sql/session.hpp"
#include "stores/mysql/connection.hpp"

namespace semel::stores::mysql {

/// A session on a connection to a server that has been checked and has the tables. Each operation
/// is one round trip, but purge (a few) and those that fail: what was begun is rolled back by
/// another.
std::unique_ptr<sql::Session> make_session(std::unique_ptr<Connection> connection);

}  // namespace semel::stores::mysql
