# Which librdkafka: the installed package's (Debian 12: 2.0.2), or a newer one that is built here and linked statically.
# See docs/decisions/0026-two-librdkafkas.md.
set(SEMEL_KAFKA system CACHE STRING "librdkafka: system (the installed package) or bundled (a newer one, built here)")
set_property(CACHE SEMEL_KAFKA PROPERTY STRINGS system bundled)
include(semelRdkafka)

if(SEMEL_KAFKA STREQUAL "system")
    semel_rdkafka()
    return()
elseif(NOT SEMEL_KAFKA STREQUAL "bundled")
    message(FATAL_ERROR "SEMEL_KAFKA=${SEMEL_KAFKA}: use system or bundled")
endif()

execute_process(COMMAND ${CMAKE_SOURCE_DIR}/scripts/fetch-librdkafka
    OUTPUT_VARIABLE librdkafka_source OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE librdkafka_failed)
if(librdkafka_failed)
    message(FATAL_ERROR "SEMEL_KAFKA=bundled: scripts/fetch-librdkafka failed; its reason is above")
endif()
foreach(header curl/curl.h sasl/sasl.h zstd.h lz4.h zlib.h)
    string(MAKE_C_IDENTIFIER has_${header} found)
    find_path(${found} ${header})
    if(NOT ${found})
        message(FATAL_ERROR "SEMEL_KAFKA=bundled needs <${header}>: run scripts/install-deps --bundled")
    endif()
    mark_as_advanced(${found})
endforeach()

# With the build type of its own, whatever ours is: its assertions stay (no NDEBUG), and sanitizers leave it alone. LZ4 is the
# installed one: a copy inside the program would come before it for RocksDB, too.
include(ExternalProject)
set(librdkafka_build ${CMAKE_BINARY_DIR}/librdkafka/build)
set(librdkafka_archive ${librdkafka_build}/src/librdkafka.a)
ExternalProject_Add(librdkafka
    SOURCE_DIR ${librdkafka_source}
    BINARY_DIR ${librdkafka_build}
    PREFIX ${CMAKE_BINARY_DIR}/librdkafka
    CMAKE_ARGS
        -DCMAKE_BUILD_TYPE=None "-DCMAKE_C_FLAGS=-O2 -g1 -w" -DCMAKE_POLICY_VERSION_MINIMUM=3.5 -Wno-dev
        -DCMAKE_C_COMPILER=${CMAKE_C_COMPILER} -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
        -DCMAKE_C_COMPILER_LAUNCHER=${CMAKE_C_COMPILER_LAUNCHER}
        -DRDKAFKA_BUILD_STATIC=ON -DRDKAFKA_BUILD_EXAMPLES=OFF -DRDKAFKA_BUILD_TESTS=OFF -DWITH_PLUGINS=OFF
        -DWITH_SSL=ON -DWITH_SASL=ON -DWITH_CURL=ON -DWITH_ZLIB=ON -DWITH_ZSTD=ON -DENABLE_LZ4_EXT=ON
    BUILD_COMMAND ${CMAKE_COMMAND} --build <BINARY_DIR> --target rdkafka
    INSTALL_COMMAND ""
    BUILD_BYPRODUCTS ${librdkafka_archive})
set(librdkafka_include ${CMAKE_BINARY_DIR}/librdkafka/include)
foreach(header rdkafka.h rdkafka_mock.h)
    configure_file(${librdkafka_source}/src/${header} ${librdkafka_include}/librdkafka/${header} COPYONLY)
endforeach()
semel_rdkafka(${librdkafka_archive})
target_include_directories(semel::rdkafka INTERFACE ${librdkafka_include})
add_dependencies(semel::rdkafka librdkafka)
install(FILES ${librdkafka_archive} DESTINATION ${CMAKE_INSTALL_LIBDIR}/semel)
install(FILES ${librdkafka_source}/LICENSES.txt DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses/librdkafka)
