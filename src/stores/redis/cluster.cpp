// A Redis Cluster: the map of its slots, a connection to each master, refreshed when something does
// not fit any more.
#include <algorithm>
#include <array>
#include <set>

#include "stores/redis/query.hpp"
#include "stores/redis/topology.hpp"

namespace semel::stores::redis {

namespace {

constexpr std::size_t kSlots = 16'384;
// The map is asked for at most so often: by redirections, and as long as a master does not answer.
constexpr milliseconds kRefreshEvery{200};
// A former master's unanswered commands are waited for so long.
constexpr milliseconds kLastWords{1000};

base::Error unavailable(std::string why) {
    return {.code = base::ErrorCode::store_unavailable, .detail = std::move(why)};
}

struct Map {
    struct Range {
        std::size_t first = 0, last = 0;
        Address master;
    };
    std::vector<Range> ranges;
    std::vector<Address> replicas;
};

// The reply of CLUSTER SLOTS. A node that does not know its own address is the one that was asked.
std::optional<Map> map_of(const Reply& reply, const Address& asked) {
    if (reply.kind != Reply::Kind::array) return {};
    Map map;
    for (const Reply& range : reply.elements) {
        if (range.elements.size() < 3) return {};
        const std::int64_t first = range.elements[0].integer;
        const std::int64_t last = range.elements[1].integer;
        if (first < 0 || last < first || last >= static_cast<std::int64_t>(kSlots)) return {};
        for (std::size_t i = 2; i < range.elements.size(); ++i) {
            const auto& node = range.elements[i].elements;
            if (node.size() < 2 || node[1].integer <= 0 || node[1].integer > 65'535) return {};
            Address address{.host = node[0].text,
                            .port = static_cast<std::uint16_t>(node[1].integer)};
            if (address.host.empty() || address.host == "?") address.host = asked.host;
            if (i == 2) {
                map.ranges.push_back({static_cast<std::size_t>(first),
                                      static_cast<std::size_t>(last), std::move(address)});
            } else {
                map.replicas.push_back(std::move(address));
            }
        }
    }
    return map;
}

class Cluster final : public Topology {
  public:
    Cluster(Shared& shared, Host& host) : shared_(shared), host_(host) {}

    void start() override { refresh(); }
    Connection* route(std::uint16_t slot) override {
        Connection* const owner = owners_[slot % kSlots].get();
        refresh_wanted_ |= owner == nullptr;
        return owner;
    }
    const Connections& all() const override { return connections_; }

    Connections masters() const override {
        Connections found;
        for (const auto& one : connections_) {
            if (serving_.contains(one.get())) found.push_back(one);
        }
        std::sort(found.begin(), found.end(),
                  [](const auto& a, const auto& b) { return a->name() < b->name(); });
        return found;
    }

    void locate(Connection& connection) override {
        for (const auto& [name, address] : addresses_) {
            if (name == connection.name()) return connection.open_at({.address = address});
        }
        connection.cannot_open(
            unavailable(connection.name() + " is no node of the Cluster any more"));
    }

    void ready(Connection&) override {
        const Connections needed = masters();
        if (std::all_of(needed.begin(), needed.end(), [](const auto& one) { return one->ready(); }))
            report({});
    }
    void lost(Connection&, const base::Error& why) override {
        report(why);
        refresh_wanted_ = true;
    }

    Connection* redirected(Cure cure, const Redirection& to) override {
        const std::shared_ptr<Connection> node = node_at(to.to);
        if (cure == Cure::follow) {
            owners_[to.slot] = node;
            serving_.insert(node.get());
            refresh_wanted_ = true;
        }
        return node.get();
    }
    bool look_elsewhere(Connection& from) override {
        refresh_wanted_ = true;
        doubted_ = from.name();
        return true;
    }

    void tick(SteadyTime now) override {
        retire(now);
        const Connections needed = masters();
        refresh_wanted_ |= std::any_of(needed.begin(), needed.end(), [now](const auto& one) {
            return one->problem(now).has_value();
        });
        if (refresh_wanted_ && query_ == nullptr && now - refreshed_ >= kRefreshEvery && reported_)
            refresh();
    }

    void stop(const std::string& why) override {
        if (query_ != nullptr) query_->cancel();
        query_.reset();
        for (const auto& one : connections_) one->close(why);
    }

  private:
    void report(std::optional<base::Error> failed) {
        if (!std::exchange(reported_, true)) host_.opened(std::move(failed));
    }

    std::shared_ptr<Connection> node_at(const Address& address) {
        const std::string name = name_of(address);
        for (const auto& one : connections_) {
            if (one->name() == name) return one;
        }
        addresses_.emplace_back(name, address);
        connections_.push_back(std::make_shared<Connection>(shared_, host_, name, false));
        const std::shared_ptr<Connection> made = connections_.back();
        made->start();
        return made;
    }

    // Those that answer first: a frozen one would cost a time-out. The one in doubt after them.
    std::vector<Place> whom_to_ask() const {
        const SteadyTime now = std::chrono::steady_clock::now();
        std::vector<Place> places;
        const auto add = [&places](const Address& address) {
            const std::string name = name_of(address);
            if (std::none_of(places.begin(), places.end(),
                             [&](const Place& one) { return one.name() == name; }))
                places.push_back({.address = address});
        };
        for (const auto& one : connections_) {
            if (!one->problem(now) && one->name() != doubted_) add(one->place().address);
        }
        for (const Address& address : replicas_) add(address);
        for (const auto& [name, address] : addresses_) add(address);
        for (const Address& address : shared_.options.target.addresses) add(address);
        return places;
    }

    void refresh() {
        refresh_wanted_ = false;
        const ClientOptions& options = shared_.options;
        Query::Question question{.places = whom_to_ask(),
                                 .tls = shared_.tls,
                                 .user = options.target.user,
                                 .password = options.target.password,
                                 .words = {"CLUSTER", "SLOTS"},
                                 .limit = options.connect_timeout};
        query_ = std::make_shared<Query>(
            shared_.io, std::move(question),
            [this](const Place& at, const Reply& reply) { return judged(at, reply); },
            [this](std::optional<base::Error> why) {
                query_.reset();
                refreshed_ = std::chrono::steady_clock::now();
                if (why) {
                    refresh_wanted_ = true;
                    return report(std::move(why));
                }
                apply();
            });
        query_->start();
    }

    std::optional<base::Error> judged(const Place& at, const Reply& reply) {
        base::Error wrong{.code = base::ErrorCode::invalid_argument};
        if (reply.kind == Reply::Kind::error) {
            if (reply.text.find("cluster support disabled") != std::string::npos) {
                wrong.detail = "the server " + at.name() +
                               " is not a node of a Redis Cluster: remove `cluster: true`";
                return wrong;
            }
            const Refusal refusal = judge(reply.text, at.name(), "CLUSTER SLOTS");
            wrong.detail = refusal.sentence;
            if (refusal.cure == Cure::later) wrong.code = base::ErrorCode::store_unavailable;
            return wrong;
        }
        auto map = map_of(reply, at.address);
        if (!map)
            return unavailable("the node " + at.name() +
                               " gives a malformed map of its Cluster's slots");
        if (map->ranges.empty())
            return unavailable("the node " + at.name() +
                               " knows of no slots: it is not part of a formed Cluster (redis-cli "
                               "--cluster create)");
        map_ = std::move(*map);
        return {};
    }

    void apply() {
        doubted_.clear();
        replicas_ = std::move(map_.replicas);
        owners_ = {};
        serving_.clear();
        for (const Map::Range& range : map_.ranges) {
            const std::shared_ptr<Connection> node = node_at(range.master);
            serving_.insert(node.get());
            for (std::size_t slot = range.first; slot <= range.last; ++slot) owners_[slot] = node;
        }
        // What waited for a server that does not answer may have another one now.
        for (const auto& one : Connections(connections_)) {
            if (one->ready() && serving_.contains(one.get())) continue;
            for (Pending& pending : one->take_waiting()) {
                if (pending.pinned || pending.asking) {
                    one->enqueue(std::move(pending));
                } else {
                    host_.dispatch(std::move(pending));
                }
            }
        }
        for (const auto& one : connections_) one->flush();
    }

    // Connections to nodes that serve no slots any more end once their last replies are there.
    void retire(SteadyTime now) {
        if (!reported_ || query_ != nullptr) return;
        for (const auto& one : Connections(connections_)) {
            if (serving_.contains(one.get())) continue;
            // It may be receiving its first slot, or still be connecting.
            const bool recent = now - one->last_used() < kLastWords;
            if (one->ready() && !one->quiet() ? one->silence(now) < kLastWords : recent) continue;
            const std::string why = one->name() + " is no master of the Cluster any more";
            one->lose(unavailable(why));
            for (Pending& pending : one->take_waiting()) {
                if (pending.pinned) {
                    pending.refuse(why);
                } else {
                    pending.asking = false;
                    host_.dispatch(std::move(pending));
                }
            }
            one->close(why);
            std::erase(connections_, one);
            std::erase_if(addresses_,
                          [&](const auto& known) { return known.first == one->name(); });
        }
    }

    Shared& shared_;
    Host& host_;
    std::array<std::shared_ptr<Connection>, kSlots> owners_;
    std::set<const Connection*> serving_;  // slots
    Connections connections_;
    std::vector<std::pair<std::string, Address>> addresses_;  // of connections_, by name
    std::vector<Address> replicas_;
    Map map_;
    std::shared_ptr<Query> query_;
    std::string doubted_;  // by name: its view of the Cluster may be out of date
    SteadyTime refreshed_{};
    bool refresh_wanted_ = false;
    bool reported_ = false;
};

}  // namespace

std::unique_ptr<Topology> cluster_topology(Shared& shared, Topology::Host& host) {
    return std::make_unique<Cluster>(shared, host);
}

}  // namespace semel::stores::redis
