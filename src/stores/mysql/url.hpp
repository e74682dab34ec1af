// Where a MySQL or MariaDB server is and who asks it, from a URL.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.hpp"

namespace semel::stores::mysql {

enum class Tls : std::uint8_t {
    off,
    required,  ///< Encrypted, with whoever answers.
    verify,    ///< The certificate must be for the host and by a known authority.
};

struct Target {
    std::string host = "localhost";
    std::uint16_t port = 3306;
    std::string user;
    std::string password;
    std::string database;
    std::string socket;  ///< Not empty: a unix socket, host and port are not used.
    Tls tls = Tls::off;
    std::string ca_file;  ///< PEM. Empty: the machine's authorities.
};

/// mysql://user:password@host:port/database[?socket=/path][&tls=required|verify][&ca_file=/path].
/// Percent-encoding is undone everywhere but in the port. Error invalid_argument: says what is
/// wrong, without quoting the URL.
base::Result<Target> parse_url(std::string_view url);

/// For messages: "127.0.0.1:3306" or the socket's path, without user and password.
std::string describe(const Target& target);

}  // namespace semel::stores::mysql
