// Record <-> bytes. Versioned; the format is docs/internals/record-format.md.
#pragma once

#include <string>
#include <string_view>

#include "base/result.hpp"
#include "core/operation.hpp"
#include "core/record.hpp"

namespace semel::core {

inline constexpr std::uint8_t record_format_version = 1;

/// Appends the encoding to `out`. With `with_body` an inline body is part of it; without, the record says that its body
/// lies elsewhere and the store brings it back (`decode_record`'s caller sets answer->body).
/// Only fields that are set are written: a bare message record takes at most 100 bytes.
void encode_record(const Record& record, bool with_body, std::string& out);

/// Error store_corrupt: not an encoding of this version (its detail says at which byte); store_version: a newer one.
base::Result<Record> decode_record(std::string_view bytes);

}  // namespace semel::core
