// Decided records the writer keeps in memory: bounded by bytes, least recently used out first. One thread.
#pragma once

#include <cstddef>
#include <list>
#include <unordered_map>
#include <utility>

#include "core/record.hpp"

namespace semel::stores {

class HotAnswers {
  public:
    explicit HotAnswers(std::size_t max_bytes) : max_bytes_(max_bytes) {}

    void put(const core::StoredKey& key, core::RecordPtr record) {
        erase(key);
        const std::size_t bytes = size_of(*record);
        // One giant must not empty the cache for everybody else.
        if (bytes > max_bytes_ / 8) return;
        entries_.push_front({key, std::move(record), bytes});
        by_key_.emplace(key, entries_.begin());
        bytes_ += bytes;
        while (bytes_ > max_bytes_) drop(std::prev(entries_.end()));
    }
    /// Null if absent.
    [[nodiscard]] core::RecordPtr find(const core::StoredKey& key) {
        const auto it = by_key_.find(key);
        if (it == by_key_.end()) return nullptr;
        entries_.splice(entries_.begin(), entries_, it->second);
        return it->second->record;
    }
    void erase(const core::StoredKey& key) {
        if (const auto it = by_key_.find(key); it != by_key_.end()) drop(it->second);
    }
    void clear() {
        by_key_.clear();
        entries_.clear();
        bytes_ = 0;
    }

  private:
    struct Entry {
        core::StoredKey key;
        core::RecordPtr record;
        std::size_t bytes;
    };
    using Entries = std::list<Entry>;

    /// The body, and what a record takes without one: fields, list and table nodes, strings.
    static std::size_t size_of(const core::Record& record) {
        constexpr std::size_t bookkeeping = 1024;
        const std::size_t body = record.answer && record.answer->body ? record.answer->body->size() : 0;
        const std::size_t turn = record.turn ? record.turn->user_content.size() : 0;
        return bookkeeping + body + turn + record.fingerprint.fields.size() * sizeof(core::FieldMark);
    }
    void drop(Entries::iterator it) {
        bytes_ -= it->bytes;
        by_key_.erase(it->key);
        entries_.erase(it);
    }

    std::size_t max_bytes_;
    std::size_t bytes_ = 0;
    Entries entries_;
    std::unordered_map<core::StoredKey, Entries::iterator, base::DigestHash> by_key_;
};

}  // namespace semel::stores
