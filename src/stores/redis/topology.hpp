// Which data servers there are, and which of them holds a slot: one server, a Sentinel-watched
// master, a Cluster.
#pragma once

#include <memory>
#include <optional>

#include "stores/redis/connection.hpp"
#include "stores/redis/refusal.hpp"

namespace semel::stores::redis {

/// All on the client's thread. Owns the connections; its host is told what happens on them first
/// and passes it on.
class Topology {
  public:
    class Host : public Connection::Host {
      public:
        /// The first attempt succeeded (nothing) or failed. Called once.
        virtual void opened(std::optional<base::Error> failed) = 0;
        /// To be routed anew.
        virtual void dispatch(Pending pending) = 0;

      protected:
        ~Host() = default;
    };
    using Connections = std::vector<std::shared_ptr<Connection>>;

    Topology() = default;
    Topology(const Topology&) = delete;
    Topology& operator=(const Topology&) = delete;
    virtual ~Topology() = default;

    virtual void start() = 0;
    /// Where the slot's commands go now, connected or not. Null: nobody serves it.
    virtual Connection* route(std::uint16_t slot) = 0;
    /// The masters, sorted by name.
    [[nodiscard]] virtual Connections masters() const = 0;
    [[nodiscard]] virtual const Connections& all() const = 0;
    virtual void locate(Connection& connection) = 0;
    virtual void ready(Connection& connection) = 0;
    virtual void lost(Connection& connection, const base::Error& why) = 0;
    /// A MOVED (`cure` follow) or ASK: the server that it names. Null without a Cluster.
    virtual Connection* redirected(Cure cure, const Redirection& to) = 0;
    /// The server is a replica, or cut off from its Cluster's majority. False: there is no other to
    /// look for.
    virtual bool look_elsewhere(Connection& from) = 0;
    /// Every few milliseconds, after the connections' own.
    virtual void tick(SteadyTime now) = 0;
    /// Answers everything and closes.
    virtual void stop(const std::string& why) = 0;
};

/// One server, or the master that sentinels name.
std::unique_ptr<Topology> single_topology(Shared& shared, Topology::Host& host);
std::unique_ptr<Topology> cluster_topology(Shared& shared, Topology::Host& host);

}  // namespace semel::stores::redis
