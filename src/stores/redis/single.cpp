// One server: by its address or socket, or by asking sentinels before each attempt to connect.
#include <algorithm>
#include <charconv>

#include "stores/redis/query.hpp"
#include "stores/redis/topology.hpp"

namespace semel::stores::redis {

namespace {

// How often the sentinels are asked whether the master is still the same.
constexpr milliseconds kWatchEvery{500};

class Single final : public Topology {
  public:
    Single(Shared& shared, Host& host)
        : shared_(shared), host_(host), sentinels_(shared.options.target.addresses) {
        const Target& target = shared.options.target;
        if (!sentinel()) {
            place_.path = target.path;
            if (!target.addresses.empty()) place_.address = target.addresses.front();
        }
        // Until the sentinels name it.
        const std::string name = sentinel() ? "the master " + target.master_name : place_.name();
        connections_.push_back(std::make_shared<Connection>(shared, host, name, sentinel()));
    }

    void start() override { connection().start(); }
    Connection* route(std::uint16_t) override { return &connection(); }
    Connections masters() const override { return connections_; }
    const Connections& all() const override { return connections_; }

    void locate(Connection& which) override {
        if (!sentinel()) return which.open_at(place_);
        cancel(watch_);
        ask(query_, [this](std::optional<base::Error> why) {
            query_.reset();
            if (why) return connection().cannot_open(std::move(*why));
            connection().rename(place_.name());
            connection().open_at(place_);
        });
    }

    void ready(Connection&) override { report({}); }
    void lost(Connection&, const base::Error& why) override {
        // A sentinel that is cut off from the others names a former master for ever.
        if (sentinel()) std::rotate(sentinels_.begin(), sentinels_.begin() + 1, sentinels_.end());
        report(why);
    }
    Connection* redirected(Cure, const Redirection&) override { return nullptr; }
    bool look_elsewhere(Connection& from) override {
        if (!sentinel()) return false;
        from.leave();
        return true;
    }
    // Sentinels that promote another server leave the old master writable for many seconds: who
    // goes on writing there loses it.
    void tick(SteadyTime now) override {
        if (!sentinel() || watch_ != nullptr || !connection().ready() ||
            now - watched_ < kWatchEvery)
            return;
        ask(watch_, [this](std::optional<base::Error> why) {
            watch_.reset();
            watched_ = std::chrono::steady_clock::now();
            if (!why && place_.name() != connection().name()) connection().leave();
        });
    }
    void stop(const std::string& why) override {
        cancel(query_);
        cancel(watch_);
        connection().close(why);
    }

  private:
    [[nodiscard]] bool sentinel() const {
        return shared_.options.target.kind == Target::Kind::sentinel;
    }
    Connection& connection() { return *connections_.front(); }
    void report(std::optional<base::Error> failed) {
        if (!std::exchange(reported_, true)) host_.opened(std::move(failed));
    }

    static void cancel(std::shared_ptr<Query>& query) {
        if (query != nullptr) std::exchange(query, nullptr)->cancel();
    }

    void ask(std::shared_ptr<Query>& query, Query::Done done) {
        Query::Question question{
            .tls = shared_.tls,
            .user = shared_.options.sentinel_user,
            .password = shared_.options.sentinel_password,
            .words = {"SENTINEL", "get-master-addr-by-name", shared_.options.target.master_name},
            .limit = shared_.options.connect_timeout};
        for (const Address& address : sentinels_) question.places.push_back({.address = address});
        query = std::make_shared<Query>(
            shared_.io, std::move(question),
            [this](const Place& at, const Reply& reply) { return judged(at, reply); },
            std::move(done));
        query->start();
    }

    std::optional<base::Error> judged(const Place& at, const Reply& reply) {
        const std::string& name = shared_.options.target.master_name;
        const std::string sentinel = "the sentinel " + at.name() + " ";
        if (reply.kind == Reply::Kind::array && reply.elements.size() == 2) {
            const std::string& port = reply.elements[1].text;
            place_.address.host = reply.elements[0].text;
            std::from_chars(port.data(), port.data() + port.size(), place_.address.port);
            // Who answered is asked first the next time.
            const auto who =
                std::find_if(sentinels_.begin(), sentinels_.end(),
                             [&](const Address& one) { return name_of(one) == at.name(); });
            if (who != sentinels_.end()) std::rotate(sentinels_.begin(), who, who + 1);
            return {};
        }
        base::Error why{.code = base::ErrorCode::invalid_argument};
        if (reply.kind != Reply::Kind::error) {
            why.detail = sentinel + "watches no master named " + name +
                         ": compare the URL's end with its `sentinel monitor`";
        } else if (reply.text.starts_with("NOAUTH")) {
            why.detail = sentinel + "wants a password: set sentinel_password";
        } else if (reply.text.find("unknown command") != std::string::npos) {
            why.detail =
                at.name() +
                " is a server, not a sentinel: name the sentinels (port 26379), or use redis://";
        } else {
            why.code = base::ErrorCode::store_unavailable;
            why.detail = sentinel + "does not name the master " + name + " (" + reply.text + ")";
        }
        return why;
    }

    Shared& shared_;
    Host& host_;
    std::vector<Address> sentinels_;
    Place place_;
    Connections connections_;
    std::shared_ptr<Query> query_;  // before connecting
    std::shared_ptr<Query> watch_;  // while connected
    SteadyTime watched_{};
    bool reported_ = false;
};

}  // namespace

std::unique_ptr<Topology> single_topology(Shared& shared, Topology::Host& host) {
    return std::make_unique<Single>(shared, host);
}

}  // namespace semel::stores::redis
