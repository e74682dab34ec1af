// For the tests of this folder: commands, and waiting for their answers.
#pragma once

#include <gtest/gtest.h>
#include <openssl/evp.h>

#include <future>
#include <memory>
#include <string>
#include <vector>

#include "stores/redis/client.hpp"
#include "stores/redis/wire.hpp"
#include "support/redis_server.hpp"

namespace semel::stores::redis {

using std::chrono::seconds;
using support::eventually;
using support::RedisServer;
using support::RedisServerOptions;

using Words = std::vector<std::string>;
using Answers = std::vector<Answer>;

inline ClientOptions options_of(std::string_view url) {
    auto target = parse_url(url);
    EXPECT_TRUE(target) << url;
    ClientOptions options;
    options.target = *target;
    return options;
}

inline std::unique_ptr<Client> connected(ClientOptions options) {
    auto client = Client::connect(std::move(options));
    EXPECT_TRUE(client) << client.error().detail;
    return client ? std::move(*client) : nullptr;
}

/// What connect() answers where it must fail; its text.
inline base::Error refused(ClientOptions options) {
    auto client = Client::connect(std::move(options));
    EXPECT_FALSE(client);
    return client ? base::Error{} : client.error();
}

/// With its SHA-1. `source` must live as long.
inline Script script_of(std::string_view name, std::string_view source) {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned size = 0;
    EVP_Digest(source.data(), source.size(), digest, &size, EVP_sha1(), nullptr);
    Script script{.name = name, .source = source, .sha1 = {}};
    for (unsigned i = 0; i < size; ++i) {
        constexpr const char* kHex = "0123456789abcdef";
        script.sha1 += {kHex[digest[i] >> 4], kHex[digest[i] & 15]};
    }
    return script;
}

inline const Script& count_script() {
    static const Script script = script_of("count", "return redis.call('INCR', KEYS[1])");
    return script;
}

/// A plain command on its first argument's slot.
inline Command plain(const Words& words, bool repeatable = false) {
    Command command = plain_command(words);
    if (words.size() > 1) command.slot = slot_of(words[1]);
    command.repeatable = repeatable;
    return command;
}

/// A script on one key.
inline Command scripted(const Script& script, const std::string& key, bool repeatable = false) {
    Command command = plain_command({"1", key});
    command.script = &script;
    command.slot = slot_of(key);
    command.repeatable = repeatable;
    return command;
}

inline std::future<Answers> submitted(Client& client, std::vector<Command> commands) {
    auto promise = std::make_shared<std::promise<Answers>>();
    auto future = promise->get_future();
    client.submit(std::move(commands),
                  [promise](Answers answers) { promise->set_value(std::move(answers)); });
    return future;
}

/// The answers; none if there are none within a long time.
inline Answers got(std::future<Answers> future) {
    const bool there = future.wait_for(seconds{30}) == std::future_status::ready;
    EXPECT_TRUE(there) << "submit() was not answered";
    return there ? future.get() : Answers{};
}

inline Answer one(Client& client, Command command) {
    std::vector<Command> commands;
    commands.push_back(std::move(command));
    Answers answers = got(submitted(client, std::move(commands)));
    EXPECT_EQ(answers.size(), 1U);
    return answers.empty() ? Answer{NoReply{.detail = "none"}} : std::move(answers.front());
}

inline std::string text_of(const Answer& answer) {
    if (const auto* none = std::get_if<NoReply>(&answer)) {
        const char* applied = none->applied == base::Applied::no ? "no" : "unknown";
        return std::string("[") + applied + (none->full ? " full] " : "] ") + none->detail;
    }
    const Reply& reply = std::get<Reply>(answer);
    return reply.kind == Reply::Kind::integer ? std::to_string(reply.integer) : reply.text;
}

inline base::Applied applied_of(const Answer& answer) {
    const auto* none = std::get_if<NoReply>(&answer);
    return none == nullptr ? base::Applied::yes : none->applied;
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

}  // namespace semel::stores::redis
