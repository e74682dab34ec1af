// What two requests must have in common to be the same request.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/hash.hpp"
#include "core/fingerprint.hpp"
#include "http/message.hpp"

namespace semel::gateway {

/// All digests and marks are keyed: without the deployment's secret nobody can try out what a request was. Thread-safe after
/// construction.
class Fingerprints {
  public:
    explicit Fingerprints(const base::Hmac& secret);

    /// Of a request as it came: method, path, query, the headers that change its meaning, and the
    /// body.
    [[nodiscard]] core::Fingerprint of(const http::RequestHead& head, std::string_view body) const {
        core::Fingerprint print;
        print.raw = raw_of(head, body);
        complete(print, head, body);
        return print;
    }
    /// Only the raw digest: a retry that sends the same bytes needs no more to be recognised.
    [[nodiscard]] base::Digest raw_of(const http::RequestHead& head, std::string_view body) const;
    /// The rest of it: the canonical digest and the marks of the members.
    void complete(core::Fingerprint& print, const http::RequestHead& head,
                  std::string_view body) const;
    /// Of named parts (`/api/chat`: content, model, stream), each covered and nameable.
    [[nodiscard]] core::Fingerprint of_parts(
        const std::vector<std::pair<std::string_view, std::string_view>>& parts) const;

    /// Names of the top-level members that differ between what is asked now and what the record was
    /// made for. A member that only the earlier request had is named if it is a known one, else it
    /// appears as "(another member)".
    [[nodiscard]] std::vector<std::string> names(const std::vector<std::uint64_t>& marks,
                                                 std::string_view body_asked_now) const;

  private:
    [[nodiscard]] base::Digest keyed(std::string_view kind, const base::Digest& digest) const;
    [[nodiscard]] std::uint64_t name_mark(std::string_view name) const;
    [[nodiscard]] std::uint64_t value_mark(std::string_view name, std::string_view identity) const;

    const base::Hmac& secret_;
    /// The usual members of chat requests by their marks, and the marks by their names.
    std::unordered_map<std::uint64_t, std::string> known_;
    std::unordered_map<std::string_view, std::uint64_t> known_marks_;
};

}  // namespace semel::gateway
