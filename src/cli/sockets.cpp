#include "cli/sockets.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
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

base::Result<config::Address> advertised(const config::PeerConfig& peer, std::uint16_t port) {
    config::Address address{.host = peer.listen.host, .port = peer.advertise_port != 0 ? peer.advertise_port : port};
    if (!peer.advertise_host.empty()) {
        address.host = peer.advertise_host;
        return address;
    }
    if (!address.wildcard()) return address;
    ifaddrs* interfaces = nullptr;
    if (getifaddrs(&interfaces) == 0) {
        const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owned(interfaces, &freeifaddrs);
        // A listener on :: usually takes both families, so IPv4 is preferred: it needs no scope.
        const bool v6 = address.host.find(':') != std::string::npos;
        for (const int family : {AF_INET, AF_INET6}) {
            if (family == AF_INET6 && !v6) continue;
            for (const ifaddrs* one = interfaces; one != nullptr; one = one->ifa_next) {
                if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != family) continue;
                if ((one->ifa_flags & IFF_UP) == 0 || (one->ifa_flags & IFF_LOOPBACK) != 0) continue;
                if (family == AF_INET6 &&
                    IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr))
                    continue;
                char text[NI_MAXHOST];
                const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
                if (getnameinfo(one->ifa_addr, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) continue;
                address.host = text;
                return address;
            }
        }
    }
    return base::Error{.detail = "peer.advertise: auto found no address of this machine that is not loopback; name the one "
                                 "under which other gateways reach it"};
}

std::uint64_t raise_open_files_limit() {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = limit.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_max : before;
}

}  // namespace semel::cli
