// Any bytes as responses of one connection.
#include "http_stream.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    semel::fuzz::read_both_ways(data, size, semel::http::Parser::Kind::response);
    return 0;
}
