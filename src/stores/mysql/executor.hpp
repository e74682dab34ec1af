// sql::Executor on a MYSQL* of MariaDB Connector/C (or of a compatible client library).
#pragma once

#include <memory>

#include "sql/executor.hpp"

struct st_mysql;  // MYSQL

namespace semel::stores::mysql {

/// Runs statements on a connection that the caller owns and keeps open meanwhile; its time-outs are
/// the caller's (MYSQL_OPT_READ_TIMEOUT). What the connection needs:
///  - CLIENT_MULTI_STATEMENTS: several statements go in one round trip. Without it they are sent
///  one by one.
///  - CLIENT_FOUND_ROWS: `affected` of an UPDATE counts the rows its WHERE matched. Without it rows
///  that already held the new
///    values are not counted, and one that was changed to what it was looks like one that is
///    missing. It cannot be asked of a connection that is open: who opens it must set it.
///  - no other result pending.
/// Parameters replace the question marks outside of strings, quoted names and comments. Bytes and
/// text go as hexadecimal literals, so that neither the connection's character set nor its sql_mode
/// matters to them; a statement's text itself is read as with the default sql_mode (backslash
/// escapes; "..." is a string).
std::unique_ptr<sql::Executor> executor_on(st_mysql* connection);

}  // namespace semel::stores::mysql
