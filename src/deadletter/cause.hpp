// The cause of a death: what failures that differ in numbers, ids and quoted values only have in
// common.
#pragma once

#include <string>
#include <string_view>

namespace semel::deadletter {

/// The message without what differs from one failure to the next: quoted values become ?, words
/// that hold a digit become #, white space becomes one space. At most
/// letter_error_message_max_bytes of the message are looked at.
std::string normalized(std::string_view error_message);

}  // namespace semel::deadletter
