// A segment is opened by name, checked, mapped once, and survives us.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <system_error>

#include "check.hpp"
#include "shared_region.hpp"

using namespace lmcache_fast;

int main() {
    const std::string name = "lmcache_fast_test_" + std::to_string(::getpid());
    const std::int64_t size = 10 * 4096 + 100;
    CHECK(throws<std::system_error>([&] { SharedRegion(name, size); }));
    const int file = ::shm_open(("/" + name).c_str(), O_CREAT | O_RDWR | O_EXCL, 0600);
    CHECK(file >= 0 && ::ftruncate(file, size) == 0);
    CHECK(throws([&] { SharedRegion(name, size + 1); }));
    CHECK(throws([&] { SharedRegion(name, 0); }));
    for (const char* bad : {"", "/", "..", "a/b"}) {
        CHECK(throws([&] { SharedRegion(bad, size); }));
    }
    {
        SharedRegion region("/" + name, size);
        const std::shared_ptr<Mapping> mapping = region.mapping();
        const auto whole = static_cast<std::uint64_t>(size);
        mapping->check_slot(0, whole);
        mapping->check_slot(whole, 0);
        CHECK(throws([&] { mapping->check_slot(1, whole); }));
        CHECK(throws([&] { mapping->check_slot(UINT64_MAX, 2); }));
        CHECK(throws([&] { mapping->check_slot(100, 10, 64); }));
        CHECK(throws([&] { mapping->check_slot(0, 10, 0); }));
        const std::uint64_t offsets[] = {0, 8192, 8192, whole - 50};
        mapping->populate(offsets, 4, 50);
        mapping->populate(offsets, 2, whole - 8192);
        CHECK(throws([&] { mapping->populate(offsets, 4, 51); }));
        region.close();
        region.close();
        CHECK(throws([&] { region.mapping(); }));
        mapping->address()[size - 1] = std::byte{7};  // still there for who holds it
    }
    std::byte last{};
    CHECK(::pread(file, &last, 1, size - 1) == 1 && last == std::byte{7});
    ::close(file);
    CHECK(::shm_unlink(("/" + name).c_str()) == 0);
}
