// What the client library holds of an answer, as values.
#pragma once

#include <mysql.h>

#include "sql/executor.hpp"

namespace semel::stores::mysql {

/// The result of the statement that `mysql` has just read. `rows` (null: the statement has none) is
/// consumed.
inline sql::ResultRows take_result(MYSQL* mysql, MYSQL_RES* rows) {
    sql::ResultRows result;
    if (rows == nullptr) {
        result.affected = static_cast<std::int64_t>(mysql_affected_rows(mysql));
        return result;
    }
    const unsigned columns = mysql_num_fields(rows);
    result.rows.reserve(static_cast<std::size_t>(mysql_num_rows(rows)));
    while (MYSQL_ROW row = mysql_fetch_row(rows)) {
        const unsigned long* sizes = mysql_fetch_lengths(rows);
        sql::Values& values = result.rows.emplace_back();
        values.reserve(columns);
        for (unsigned i = 0; i < columns; ++i) {
            values.emplace_back();
            if (row[i] != nullptr) values.back().emplace(row[i], sizes[i]);
        }
    }
    mysql_free_result(rows);
    return result;
}

}  // namespace semel::stores::mysql
