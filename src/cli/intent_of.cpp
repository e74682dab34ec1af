#include "cli/intent_of.hpp"

#include <future>
#include <map>
#include <memory>
#include <utility>

#include "gateway/identity.hpp"

namespace semel::cli {

namespace {
constexpr std::size_t secret_bytes = 32;
constexpr std::size_t store_id_bytes = 8;
constexpr std::chrono::seconds store_patience{30};

/// Nullopt: nothing says whose it is, or the name is too long.
std::optional<std::string> tenant_named(const base::Hmac& hmac, bool has_clients, const admin::IntentName& name) {
    std::string tenant;
    if (!name.client.empty()) {
        tenant = gateway::tenant_of_client(name.client);
    } else if (!name.credential.empty()) {
        tenant = gateway::tenant_of_credential(hmac, name.credential);
    } else if (!has_clients) {
        tenant = gateway::anonymous_tenant;
    } else {
        return std::nullopt;
    }
    if (tenant.size() > core::key_part_max_bytes) return std::nullopt;
    return tenant;
}
}  // namespace

core::TenantTag tenant_of_consumer(const config::ConsumerConfig& consumer,
                                   const base::Hmac& secret) {
    return gateway::tenant_tag(secret, "consumer:" + consumer.scope);
}

admin::TenantOf tenant_of(const config::Config& config, const std::string& secret) {
    const auto hmac = std::make_shared<base::Hmac>(secret);
    const bool has_clients = !config.clients.empty();
    std::map<std::string, core::TenantTag> consumers;
    for (const config::ConsumerConfig& consumer : config.consumers) {
        const bool here = consumer.strategy == config::ConsumerStrategy::store &&
                          config::store_of(consumer, config) == config.store;
        if (here) consumers[consumer.name] = tenant_of_consumer(consumer, *hmac);
    }
    return [hmac, has_clients, consumers = std::move(consumers)](
               const admin::IntentName& name) -> std::optional<core::TenantTag> {
        if (!name.consumer.empty()) {
            const auto found = consumers.find(name.consumer);
            if (found == consumers.end()) return std::nullopt;
            return found->second;
        }
        // Where no clients are configured the callers without a credential go by the name of their tenant.
        const bool anonymous = !has_clients && name.client == gateway::anonymous_tenant;
        const auto tenant = tenant_named(*hmac, has_clients, anonymous ? admin::IntentName{} : name);
        if (!tenant) return std::nullopt;
        return gateway::tenant_tag(*hmac, *tenant);
    };
}

/// The deployment-wide value of that name; `fresh` is stored where there is none.
static base::Result<std::string> claimed(core::Store& store, std::string name, std::string fresh) {
    auto answered = std::make_shared<std::promise<core::BatchResults>>();
    auto answer = answered->get_future();
    std::vector<core::Item> items;
    items.push_back({core::StoredKey{}, core::ClaimValue{.name = std::move(name), .value_if_absent = std::move(fresh)}});
    store.submit(std::move(items), [answered](core::BatchResults results) { answered->set_value(std::move(results)); });
    if (answer.wait_for(store_patience) != std::future_status::ready) {
        return base::Error{.code = base::ErrorCode::store_unavailable, .detail = "the store did not answer within 30 s"};
    }
    core::BatchResults results = answer.get();
    SEMEL_ASSERT(results.size() == 1, "a store gives one result per item");
    if (!results.front()) return results.front().error();
    const auto* value = std::get_if<core::Value>(&results.front()->outcome);
    SEMEL_ASSERT(value != nullptr, "ClaimValue is answered by a Value");
    return value->value;
}

base::Result<std::string> secret_of(const config::Config& config, core::Store& store) {
    if (!config.engine.secret.empty()) return config.engine.secret;
    return claimed(store, "secret", base::random_bytes(secret_bytes));
}

base::Result<std::string> peer_secret_of(core::Store& store) {
    return claimed(store, "peer-secret", base::random_bytes(secret_bytes));
}

base::Result<std::string> store_id_of(core::Store& store) {
    return claimed(store, "store-id", base::hex(base::random_bytes(store_id_bytes)));
}

admin::IntentOf intent_of(const config::Config& config, const std::string& secret) {
    const auto hmac = std::make_shared<base::Hmac>(secret);
    const bool has_clients = !config.clients.empty();
    return [hmac, has_clients](const admin::IntentName& name) -> std::optional<core::StoredKey> {
        for (const std::string* part : {&name.client, &name.operation, &name.user, &name.session, &name.id}) {
            if (part->size() > core::key_part_max_bytes) return std::nullopt;
        }
        const auto tenant = tenant_named(*hmac, has_clients, name);
        if (!tenant) return std::nullopt;
        return gateway::stored_key(*hmac, {.tenant = *tenant,
                                           .operation = name.operation,
                                           .user = name.user,
                                           .session = name.session,
                                           .id = name.id});
    };
}

}  // namespace semel::cli
