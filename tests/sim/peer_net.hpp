// PeerNet: the network between the gateway processes of a simulation: connections to their peer
// addresses in virtual time, which can be refused, swallowed and broken.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>

#include "http/client.hpp"
#include "http/exchange.hpp"
#include "sim/world.hpp"

namespace semel::sim {

/// Addresses are those that World gives its processes as owners' peers. Outlives them.
class PeerNet {
  public:
    explicit PeerNet(World& world) : world_(world) {}

    /// From now on, `process` (in its present incarnation) serves at its address. Until it is
    /// destroyed the handler must live.
    void serve(Process& process, http::Handler& handler);

    enum class Reach { yes, refused, swallowed };
    Reach reach = Reach::yes;  ///< Of connections that begin.
    /// Resets all connections.
    void break_all();
    /// Changes what a server sends; for a stranger at the address.
    std::function<void(std::string&)> tamper;
    unsigned connections = 0;  ///< Accepted so far.
    microseconds latency_min{100};
    microseconds latency_max{1000};

    /// A client of `process` that reaches peers over this net and everything else by `others`.
    std::unique_ptr<http::Client> client(Process& process, std::unique_ptr<http::Client> others);

  private:
    struct Connection;
    class ServerSide;
    class ClientSide;
    class NetClient;
    struct Served {
        Process* process;
        int incarnation;
        http::Handler* handler;
    };
    static runtime::Task<> run(std::shared_ptr<ServerSide> side, http::Handler* handler);
    void to_client(const std::shared_ptr<Connection>& connection,
                   std::function<void(Connection&)> what);

    World& world_;
    std::map<std::string, Served> served_;  ///< By host:port.
    std::list<std::weak_ptr<Connection>> open_;
};

}  // namespace semel::sim
