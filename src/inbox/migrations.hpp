// The texts of migrations/*/0001.sql.
#pragma once

namespace semel::inbox {

extern const char* const postgres_1;
extern const char* const mysql_1;

}  // namespace semel::inbox
