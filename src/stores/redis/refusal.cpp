#include "stores/redis/refusal.hpp"

#include <charconv>

namespace semel::stores::redis {

namespace {

constexpr int kSlots = 16'384;

// Some errors quote the arguments, which may be keys.
std::string without_arguments(std::string_view error) {
    const std::size_t quoted = error.find(", with args beginning");
    return std::string(error.substr(0, quoted));
}

bool of_a_script(std::string_view error) {
    return error.find("user_script") != std::string_view::npos ||
           error.starts_with("ERR Error running script");
}

}  // namespace

Refusal judge(std::string_view error, const std::string& server, const std::string& command) {
    const std::string_view code = error.substr(0, error.find(' '));
    const std::string at = "the server " + server + " ";
    const std::string said = " (" + without_arguments(error) + ")";
    if (code == "NOSCRIPT") return {Cure::send_source, at + "does not know the script " + command};
    if (code == "MOVED") return {Cure::follow, at + "no longer holds the key's slot"};
    if (code == "ASK") return {Cure::ask, at + "is giving the key's slot to another node"};
    if (code == "TRYAGAIN")
        return {Cure::later,
                at + "is giving the keys of " + command + " to another node, one by one"};
    if (code == "CLUSTERDOWN")
        return {Cure::ask_others,
                "the Cluster of " + server + " is down" + said +
                    ": see CLUSTER INFO there; a master without replica is missing, "
                    "or slots are not assigned"};
    if (code == "LOADING")
        return {Cure::later, at + "is still loading its data: wait until it is ready"};
    if (code == "MASTERDOWN")
        return {Cure::later,
                at + "is a replica that has lost its master: wait for it, or name the master"};
    if (code == "BUSY")
        return {Cure::later,
                at + "is busy with somebody's script" + said + ": SCRIPT KILL ends it there"};
    if (code == "NOREPLICAS")
        return {Cure::later, at + "has fewer good replicas than its min-replicas-to-write: bring "
                                  "them back, or lower it"};
    if (code == "MISCONF")
        return {Cure::later, at + "refuses writes because it cannot save to its disk: look for "
                                  "free space and at its log"};
    // Of a command and of a script's first write alike; our scripts write nothing before.
    if (code == "OOM")
        return {Cure::full, at + "is at its maxmemory and evicts nothing: give it more memory, or "
                                 "shorten the retention"};
    if (code == "READONLY")
        return {Cure::find_master,
                at + "is a read-only replica: name the master, or use redis-sentinel://"};
    if (of_a_script(error))
        return {Cure::uncertain, at + "stopped the script " + command + " on its way" + said};
    if (code == "NOAUTH") return {Cure::none, at + "wants a password" + ": put it into the URL"};
    if (code == "WRONGPASS")
        return {Cure::none, at + "refuses user and password: compare the URL with its ACL"};
    if (code == "NOPERM")
        return {Cure::none, at + "does not permit " + command + " to this user" + said +
                                ": extend the user's ACL"};
    return {Cure::none, at + "refused " + command + said};
}

std::optional<Redirection> redirection(std::string_view error, const std::string& sender) {
    const std::size_t first = error.find(' ');
    const std::size_t second = first == std::string_view::npos ? first : error.find(' ', first + 1);
    if (second == std::string_view::npos) return {};
    const std::string_view slot = error.substr(first + 1, second - first - 1);
    const std::string_view place = error.substr(second + 1);
    const std::size_t colon = place.rfind(':');
    if (colon == std::string_view::npos) return {};
    Redirection to;
    to.to.host = colon == 0 ? sender : std::string(place.substr(0, colon));
    const std::string_view port = place.substr(colon + 1);
    const auto whole = [](std::string_view text, auto& value) {
        const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
        return code == std::errc{} && end == text.data() + text.size();
    };
    if (!whole(slot, to.slot) || to.slot >= kSlots || !whole(port, to.to.port)) return {};
    return to;
}

}  // namespace semel::stores::redis
