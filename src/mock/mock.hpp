// mock-upstream: the pretended AI API as a server, in this process or as a subcommand.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "mock/upstream.hpp"

namespace semel::mock {

struct Options {
    std::string host = "127.0.0.1";
    std::uint16_t port = 9999;  ///< 0: any free one.
    unsigned threads = 1;
    Defaults defaults;
};

/// Reads the command line after `mock-upstream`. Error invalid_argument: a sentence for the user.
base::Result<Options> parse_options(const std::vector<std::string>& arguments);

/// A running server with its own threads. Destroying it closes all connections at once.
class Server {
  public:
    /// Error io: the address cannot be bound.
    static base::Result<std::unique_ptr<Server>> start(const Options& options);
    virtual ~Server() = default;
    Server() = default;
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;

    [[nodiscard]] virtual std::uint16_t port() const = 0;
    /// Its calls and scripts. Thread-safe.
    [[nodiscard]] virtual State& state() = 0;
};

/// `semel mock-upstream ARGUMENTS`: prints its address to stdout, serves until SIGINT or SIGTERM.
/// An exit code: 0, 1 (address in use), 2 (wrong arguments). Call before any other thread exists.
int run(const std::vector<std::string>& arguments);
std::string help();

}  // namespace semel::mock
