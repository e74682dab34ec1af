#include "stores/redis/wire.hpp"

#include <hiredis/read.h>

#include <array>
#include <charconv>
#include <utility>

#include "base/assert.hpp"

namespace semel::stores::redis {

namespace {

// hiredis moves all of what it has not read to the front of its buffer after each kilobyte: given
// more at once, most of a core went into moving replies about.
constexpr std::size_t kPieceBytes = 4096;

void append_head(std::string& out, char kind, std::size_t count) {
    char text[24];
    text[0] = kind;
    char* end = std::to_chars(text + 1, text + sizeof text - 2, count).ptr;
    *end++ = '\r';
    *end++ = '\n';
    out.append(text, static_cast<std::size_t>(end - text));
}

// Where hiredis wants the value that it has just read: the root, or its place in the array around
// it.
Reply& place_of(const redisReadTask* task) {
    if (task->parent == nullptr) return *static_cast<Reply*>(task->privdata);
    return static_cast<Reply*>(task->parent->obj)->elements[static_cast<std::size_t>(task->idx)];
}

void* make_string(const redisReadTask* task, char* text, std::size_t size) {
    Reply& reply = place_of(task);
    reply.kind = task->type == REDIS_REPLY_ERROR    ? Reply::Kind::error
                 : task->type == REDIS_REPLY_STATUS ? Reply::Kind::status
                                                    : Reply::Kind::string;
    reply.text.assign(text, size);
    return &reply;
}
void* make_array(const redisReadTask* task, int size) {
    if (size > ReplyReader::kMaxElements) return nullptr;
    Reply& reply = place_of(task);
    reply.kind = Reply::Kind::array;
    reply.elements.resize(static_cast<std::size_t>(size));
    return &reply;
}
void* make_integer(const redisReadTask* task, long long value) {
    Reply& reply = place_of(task);
    reply.kind = Reply::Kind::integer;
    reply.integer = value;
    return &reply;
}
void* make_nil(const redisReadTask* task) {
    Reply& reply = place_of(task);
    reply.kind = Reply::Kind::nil;
    return &reply;
}
// Everything lives in the root, which the ReplyReader owns.
void forget(void*) {}

redisReplyObjectFunctions* functions() {
    static redisReplyObjectFunctions all{make_string, make_array, make_integer, make_nil, forget};
    return &all;
}

constexpr std::array<std::uint16_t, 256> crc_table() {
    std::array<std::uint16_t, 256> table{};
    for (unsigned i = 0; i < table.size(); ++i) {
        unsigned crc = i << 8;
        for (int bit = 0; bit < 8; ++bit)
            crc = (crc & 0x8000U) != 0 ? (crc << 1) ^ 0x1021U : crc << 1;
        table[i] = static_cast<std::uint16_t>(crc);
    }
    return table;
}

}  // namespace

void append_argument(std::string& wire, std::string_view argument) {
    append_head(wire, '$', argument.size());
    wire.append(argument);
    wire.append("\r\n", 2);
}

std::uint16_t slot_of(std::string_view tag) {
    static constexpr auto table = crc_table();
    if (const std::size_t open = tag.find('{'); open != std::string_view::npos) {
        const std::size_t close = tag.find('}', open + 1);
        if (close != std::string_view::npos && close != open + 1)
            tag = tag.substr(open + 1, close - open - 1);
    }
    unsigned crc = 0;
    for (const char c : tag)
        crc = ((crc << 8) ^ table[((crc >> 8) ^ static_cast<unsigned char>(c)) & 0xffU]) & 0xffffU;
    return static_cast<std::uint16_t>(crc % 16'384);
}

void append_command(std::string& out, const Command& command, ScriptForm form) {
    const bool script = command.script != nullptr;
    append_head(out, '*', command.arguments + (script ? 2U : 0U));
    if (script && form == ScriptForm::sha1) {
        out.append("$7\r\nEVALSHA\r\n$40\r\n", 18);
        out.append(command.script->sha1);
        out.append("\r\n", 2);
    } else if (script) {
        out.append("$4\r\nEVAL\r\n", 10);
        append_argument(out, command.script->source);
    }
    out.append(command.wire);
}

Command plain_command(const std::vector<std::string>& words) {
    Command command;
    command.arguments = static_cast<std::uint32_t>(words.size());
    for (const std::string& word : words) append_argument(command.wire, word);
    return command;
}

std::string name_of(const Command& command) {
    if (command.script != nullptr) return std::string(command.script->name);
    const std::size_t begin = command.wire.find('\n') + 1;
    return command.wire.substr(begin, command.wire.find('\r', begin) - begin);
}

std::string name_of(const Address& address) {
    const bool v6 = address.host.find(':') != std::string::npos;
    return (v6 ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
}

ReplyReader::ReplyReader() : reader_(redisReaderCreateWithFunctions(functions())) {
    SEMEL_ASSERT(reader_ != nullptr, "out of memory for a Redis reader");
    reader_->privdata = &root_;
}
ReplyReader::~ReplyReader() { redisReaderFree(reader_); }

ReplyReader::Next ReplyReader::next(Reply& reply) {
    void* made = nullptr;
    for (;;) {
        if (redisReaderGetReply(reader_, &made) != REDIS_OK) return Next::broken;
        if (made != nullptr) break;
        if (unread_.empty()) return Next::more;
        const std::string_view piece = unread_.substr(0, kPieceBytes);
        redisReaderFeed(reader_, piece.data(), piece.size());
        unread_.remove_prefix(piece.size());
    }
    reply = std::exchange(root_, Reply{});
    return Next::reply;
}

std::string ReplyReader::problem() const { return reader_->errstr; }

}  // namespace semel::stores::redis
