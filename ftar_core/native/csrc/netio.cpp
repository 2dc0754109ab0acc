// See netio.h.
#include "netio.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <vector>

namespace ftar {

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_;
};

void bind_device(int fd, const std::string& device) {
  if (device.empty()) return;
  if (::setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, device.c_str(), static_cast<socklen_t>(device.size())) != 0) {
    fail("binding a socket to " + device);
  }
}

int make_socket(const Address& address, int type, const std::string& device) {
  Fd fd(::socket(address.family(), type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) fail("socket");
  if (address.family() == AF_INET6) {
    const int on = 1;
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  }
  if (type == SOCK_DGRAM) {
    // Whole or not at all: a long beat asks whether the path takes packets of its size.
    const int whole = address.family() == AF_INET6 ? IPV6_PMTUDISC_PROBE : IP_PMTUDISC_PROBE;
    address.family() == AF_INET6 ? ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_MTU_DISCOVER, &whole, sizeof whole)
                                 : ::setsockopt(fd.get(), IPPROTO_IP, IP_MTU_DISCOVER, &whole, sizeof whole);
  }
  bind_device(fd.get(), device);
  return fd.release();
}

}  // namespace

int Address::port() const {
  return ntohs(family() == AF_INET ? reinterpret_cast<const sockaddr_in*>(&storage)->sin_port
                                   : reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
}

void Address::set_port(int port) {
  if (family() == AF_INET) {
    reinterpret_cast<sockaddr_in*>(&storage)->sin_port = htons(static_cast<uint16_t>(port));
  } else {
    reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port = htons(static_cast<uint16_t>(port));
  }
}

std::string Address::host() const {
  char text[INET6_ADDRSTRLEN] = "";
  const void* raw = family() == AF_INET
                        ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr)
                        : static_cast<const void*>(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr);
  ::inet_ntop(family(), raw, text, sizeof text);
  return text;
}

bool Address::same_host(const Address& b) const {
  if (family() != b.family()) return false;
  if (family() == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(&b.storage)->sin_addr.s_addr;
  }
  return std::memcmp(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr,
                     &reinterpret_cast<const sockaddr_in6*>(&b.storage)->sin6_addr, 16) == 0;
}

Address parse_address(const std::string& host, int port, const std::string& device) {
  if (port < 0 || port > 65535) throw std::invalid_argument("port " + std::to_string(port) + " is not in 0..65535");
  Address a;
  in_addr v4{};
  in6_addr v6{};
  const std::string bare = host.substr(0, host.find('%'));
  if (::inet_pton(AF_INET, bare.c_str(), &v4) == 1) {
    auto* s = reinterpret_cast<sockaddr_in*>(&a.storage);
    s->sin_family = AF_INET;
    s->sin_addr = v4;
    a.length = sizeof *s;
  } else if (::inet_pton(AF_INET6, bare.c_str(), &v6) == 1) {
    auto* s = reinterpret_cast<sockaddr_in6*>(&a.storage);
    s->sin6_family = AF_INET6;
    s->sin6_addr = v6;
    if (IN6_IS_ADDR_LINKLOCAL(&v6) && !device.empty()) s->sin6_scope_id = ::if_nametoindex(device.c_str());
    a.length = sizeof *s;
  } else {
    throw std::invalid_argument("'" + host + "' is not a numeric IPv4 or IPv6 address");
  }
  a.set_port(port);
  return a;
}

std::vector<Address> addresses_of(const std::string& device, int family) {
  std::vector<Address> found;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) fail("getifaddrs");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != family || device != i->ifa_name) continue;
    Address a;
    a.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&a.storage, i->ifa_addr, a.length);
    found.push_back(a);
  }
  return found;
}

std::optional<Address> choose_address(const Address& wanted, const std::vector<Address>& present) {
  const auto link_local = [](const Address& a) {
    return a.family() == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(&a.storage)->sin6_addr);
  };
  std::optional<Address> chosen;
  for (const Address& a : present) {
    if (a.same_host(wanted)) return wanted;
    if (!chosen && link_local(a) == link_local(wanted)) chosen = a;
  }
  if (chosen) chosen->set_port(wanted.port());
  return chosen;
}

Address current_address(const Address& wanted, const std::string& device) {
  if (device.empty()) return wanted;
  if (const auto now = choose_address(wanted, addresses_of(device, wanted.family()))) return *now;
  throw std::runtime_error(device + " has no " + (wanted.family() == AF_INET ? "IPv4" : "IPv6") + " address");
}

Sockets open_rail(const Address& address, const std::string& device, const std::string& rail) {
  const std::string what = "rail " + rail + " (" + address.host() + (device.empty() ? "" : " on " + device) + ")";
  if (!device.empty()) {
    if (::if_nametoindex(device.c_str()) == 0) throw std::invalid_argument(what + ": there is no network device " + device);
    bool there = false;
    for (const Address& a : addresses_of(device, address.family())) there = there || a.same_host(address);
    if (!there) throw std::invalid_argument(what + ": " + device + " does not have this address");
  }
  // Both sockets want one number; another program may hold the UDP one, so try a few.
  for (int attempt = 0;; ++attempt) {
    Fd listener(make_socket(address, SOCK_STREAM, device));
    Address a = address;
    if (attempt > 0) a.set_port(0);
    if (::bind(listener.get(), a.get(), a.length) != 0) {
      if (errno == EADDRINUSE && attempt == 0 && address.port() != 0) continue;
      if (errno == EADDRNOTAVAIL) throw std::invalid_argument(what + ": this machine does not have the address");
      fail(what);
    }
    if (::listen(listener.get(), 128) != 0) fail(what);
    if (::getsockname(listener.get(), a.get(), &a.length) != 0) fail(what);
    Fd udp(make_socket(address, SOCK_DGRAM, device));
    if (::bind(udp.get(), a.get(), a.length) != 0) {
      if (errno == EADDRINUSE && attempt < 20) continue;
      fail(what);
    }
    const int port = a.port();
    return {listener.release(), udp.release(), port};
  }
}

void tune(int fd, const std::string& congestion) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // The host's default may be made for the internet (bbr); a kernel without the wanted one keeps its default.
  if (!congestion.empty()) {
    ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion.c_str(), static_cast<socklen_t>(congestion.size()));
  }
}

int dial(const Address& from, const Address& to, const std::string& device, const std::string& congestion) {
  Fd fd(make_socket(to, SOCK_STREAM, device));
  tune(fd.get(), congestion);
  Address local = from;
  local.set_port(0);
  if (::bind(fd.get(), local.get(), local.length) != 0) fail("binding to " + local.host());
  if (::connect(fd.get(), to.get(), to.length) != 0 && errno != EINPROGRESS) fail("connecting to " + to.host());
  return fd.release();
}

std::string mtu_difference(int fd, const std::string& device, const Address& peer) {
  ifreq request{};
  if (device.empty() || device.size() >= IFNAMSIZ) return "";
  std::memcpy(request.ifr_name, device.data(), device.size());
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::ioctl(fd, SIOCGIFMTU, &request) != 0 || ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return "";
  const unsigned headers = (peer.family() == AF_INET6 ? 60u : 40u) + ((info.tcpi_options & TCPI_OPT_TIMESTAMPS) != 0 ? 12u : 0u);
  const unsigned packet = info.tcpi_snd_mss + headers;
  const auto ours = static_cast<unsigned>(request.ifr_mtu);
  if (packet >= ours || ours > 65000) return "";  // the loopback's packets are never that long
  return "the MTU is " + std::to_string(ours) + " at " + device + " and " + std::to_string(packet) + " at or on the way to " +
         peer.host() + ": set both alike";
}

std::string socket_error(int error) {
  switch (error) {
    case ECONNREFUSED:
      return "connection refused";
    case ECONNRESET:
    case EPIPE:
      return "connection reset by the peer";
    case ETIMEDOUT:
      return "connection timed out";
    default:
      return std::generic_category().message(error);
  }
}

CarrierReader::CarrierReader() : fd_(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
  if (fd_ < 0) fail("socket");
}

CarrierReader::~CarrierReader() { ::close(fd_); }

bool CarrierReader::carrier(const std::string& device, std::string* reason) const {
  if (device.empty()) return true;
  ethtool_value value{};
  value.cmd = ETHTOOL_GLINK;
  ifreq request{};
  std::memcpy(request.ifr_name, device.data(), device.size() < IFNAMSIZ - 1 ? device.size() : IFNAMSIZ - 1);
  request.ifr_data = reinterpret_cast<char*>(&value);
  if (::ioctl(fd_, SIOCETHTOOL, &request) == 0) {
    if (value.data != 0) return true;
    *reason = device + " has no carrier";
    return false;
  }
  if (errno == ENODEV) {
    *reason = device + " is gone";
    return false;
  }
  return true;  // a device without link state (a tunnel): heartbeats are its only judge
}

}  // namespace ftar
