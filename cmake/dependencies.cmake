# Third-party libraries: Debian 12 packages, found once, each wrapped so that only the module that uses it links it.
find_package(Threads REQUIRED)
find_package(OpenSSL 3.0 REQUIRED)
find_package(Boost 1.81 REQUIRED COMPONENTS json url)
find_package(spdlog REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(CLI11 REQUIRED)
find_package(RocksDB REQUIRED)
find_package(prometheus-cpp REQUIRED)
find_package(simdjson REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(hiredis REQUIRED IMPORTED_TARGET hiredis)
pkg_check_modules(libpq REQUIRED IMPORTED_TARGET libpq)
pkg_check_modules(mariadb REQUIRED IMPORTED_TARGET libmariadb)
pkg_check_modules(rabbitmq REQUIRED IMPORTED_TARGET librabbitmq)
include(librdkafka)

# Asio is header-only by default; compiled once instead (runtime/asio_impl.cpp), it saves a second a file.
add_library(semel_asio INTERFACE)
target_compile_definitions(semel_asio INTERFACE BOOST_ASIO_SEPARATE_COMPILATION BOOST_ASIO_NO_DEPRECATED)
target_link_libraries(semel_asio INTERFACE Boost::boost Threads::Threads OpenSSL::SSL OpenSSL::Crypto)

# llhttp: three C files from Debian's package node-llhttp, unpacked by scripts/install-deps (the package itself drags in Node.js).
set(SEMEL_LLHTTP_DIR ${CMAKE_SOURCE_DIR}/.deps/llhttp CACHE PATH "Folder with llhttp.h, llhttp.c, api.c, http.c")
if(NOT EXISTS ${SEMEL_LLHTTP_DIR}/llhttp.c)
    message(FATAL_ERROR "llhttp is not in ${SEMEL_LLHTTP_DIR}: run scripts/install-deps")
endif()
add_library(llhttp STATIC ${SEMEL_LLHTTP_DIR}/llhttp.c ${SEMEL_LLHTTP_DIR}/api.c ${SEMEL_LLHTTP_DIR}/http.c)
target_include_directories(llhttp SYSTEM PUBLIC ${SEMEL_LLHTTP_DIR})
# Strict mode refuses, among others, garbage after a chunk's data (request smuggling). Library and users must agree on it.
target_compile_definitions(llhttp PUBLIC LLHTTP_STRICT_MODE=1)
target_compile_options(llhttp PRIVATE -O2 -w)

if(SEMEL_TESTS)
    find_package(GTest 1.12 REQUIRED)
endif()
if(SEMEL_BENCH)
    find_package(benchmark REQUIRED)
endif()
