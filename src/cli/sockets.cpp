#include "cli/sockets.hpp"

#include <netdb.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "cli/http_call.hpp"

namespace semel::cli {

base::Result<void> can_listen(const config::Address& address) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
    addrinfo* found = nullptr;
    const std::string where = authority(address);
    if (const int failed = getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found); failed != 0) {
        return base::Error{.detail = where + ": " + gai_strerror(failed)};
    }
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, &freeaddrinfo);
    const int descriptor = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (descriptor < 0) return base::Error{.detail = where + ": " + std::strerror(errno)};
    const int yes = 1;
    setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    const bool bound = bind(descriptor, found->ai_addr, found->ai_addrlen) == 0 && listen(descriptor, 1) == 0;
    const int reason = errno;
    close(descriptor);
    if (bound) return {};
    std::string detail = where + ": " + std::strerror(reason);
    if (reason == EADDRINUSE) detail += "; another process listens there: end it, or configure another port";
    return base::Error{.detail = detail};
}

std::uint64_t raise_open_files_limit() {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = limit.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_max : before;
}

}  // namespace semel::cli
