// A connection's state machine under bytes of strangers, and of peers that know the token: over a socket pair, as acceptor
// and as dialler. The input is a program of small steps: bytes for the connection, events for it, what its user does.
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <mutex>

#include "fuzz.h"
#include "rail.h"
#include "transport.h"

using namespace ftar;

namespace {

const std::string kKey = link_key("a token of the fuzzer", "fuzz");
constexpr uint64_t kNobody = 1ull << 40;  // an id of no connection of the transport: it is driven from here only
constexpr size_t kRoom = 1 << 16;

// A link end as strict as ours about sizes, and about what it may be told when.
class User final : public ConnUser {
 public:
  explicit User(bool later) : later_(later), room_(kRoom) {}

  void conn_open(Conn&) override { opened_ = true; }
  void conn_parked(Conn&) override {}
  void conn_heard(Conn&) override {}
  Placement data_begins(Conn&, const FrameHeader& h) override {
    must(left_ == 0, "a data frame begins when the last one is complete");
    if (h.total > kRoom) return {Placement::Kind::refused, nullptr, "too large"};
    if (later_) return {Placement::Kind::later, nullptr, nullptr};
    left_ = h.length;
    return {Placement::Kind::here, room_.data() + h.offset, nullptr};
  }
  void data_arrived(Conn&, size_t bytes) override {
    must(bytes <= left_, "no byte more than the frame has");
    left_ -= bytes;
  }
  void data_complete(Conn&, const FrameHeader&) override { must(left_ == 0, "complete when all bytes are there"); }
  const char* control(Conn&, const FrameHeader& h, std::string_view text) override {
    must(text.size() == h.length && text.size() <= kMaxControlText, "a control frame has its text");
    return h.seq == 13 ? "not that one" : nullptr;
  }
  void batch_done(Conn&) override {}
  bool next_frame(Conn&, FrameHeader* h, const std::byte** payload) override {
    if (to_send_ == 0) return false;
    --to_send_;
    *h = FrameHeader();
    h->length = 5000;
    h->total = 5000;
    *payload = room_.data();
    return true;
  }
  void conn_closed(Conn& conn, const std::string& reason, ConnEnd) override {
    must(!conn.is_open() && !closed_ && !reason.empty(), "a connection ends once, for a reason");
    closed_ = true;
  }
  void places(bool later) { later_ = later; }
  void send(int frames) { to_send_ += frames; }

 private:
  bool later_;
  bool opened_ = false;
  bool closed_ = false;
  uint64_t left_ = 0;
  int to_send_ = 0;
  std::vector<std::byte> room_;
};

struct World {
  Transport transport;
  Conn* proven = nullptr;
  World() : transport(kKey, Options(), {{"rail0", "", "127.0.0.1"}}) {
    transport.start([this](Conn& c) { proven = &c; }, [](double now) { return now + 1000; });
  }
};

std::string drain(int fd) {
  std::string out(1 << 17, '\0');
  const ssize_t n = ::recv(fd, out.data(), out.size(), MSG_DONTWAIT);
  out.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return out;
}

void give(int fd, std::string_view text) {
  [[maybe_unused]] const ssize_t n = ::send(fd, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

Hello hello() {
  Hello h;
  h.epoch = "epochepochepoch!";
  h.nonce = "noncenoncenonce!";
  h.from = "r0";
  h.to = "r1";
  h.rail = "rail0";
  return h;
}

// The honest handshake of the other end, up to where the input takes over.
void shake(Conn& conn, int peer, bool dialled) {
  Challenge c;
  if (dialled) {
    c.nonce = "0123456789abcdef";
    unsigned char out[Challenge::kSize];
    c.write(out);
    give(peer, {reinterpret_cast<const char*>(out), sizeof out});
    conn.on_event(EPOLLIN);
    const std::string said = drain(peer);
    Hello theirs;
    if (said.size() <= Hello::kPrefix) return;
    must(theirs.parse(std::string_view(said).substr(Hello::kPrefix), kKey, c) == nullptr, "our own hello is in order");
    give(peer, Answer{AnswerCode::welcome, ""}.write(kKey, c, theirs));
    conn.on_event(EPOLLIN);
    must(conn.is_open(), "a good handshake opens a dialled connection");
  } else {
    const std::string said = drain(peer);
    must(said.size() == Challenge::kSize, "an acceptor speaks first");
    must(c.parse(reinterpret_cast<const unsigned char*>(said.data())) == nullptr, "our own challenge is in order");
    give(peer, hello().write(kKey, c));
    conn.on_event(EPOLLIN);
    must(conn.stage() == Conn::Stage::parked, "a good handshake proves an accepted connection");
  }
}

void run(Conn& conn, User& user, int peer, Cursor in, World& world) {
  for (int steps = 0; !in.empty() && steps < 200; ++steps) {
    const uint8_t op = in.byte();
    switch (op % 12) {
      case 0:
      case 1: give(peer, in.bytes(in.byte())); break;
      case 2: give(peer, in.bytes(in.byte() * 16u)); break;
      case 3:
      case 4: conn.on_event(EPOLLIN); break;
      case 5: conn.on_event(EPOLLIN | EPOLLOUT | (op & 16 ? EPOLLRDHUP : 0u)); break;
      case 6:
        user.places((op & 16) != 0);
        conn.kick();
        break;
      case 7:
        user.send(op / 12);
        conn.flush();
        break;
      case 8: drain(peer); break;
      case 9:
        if (conn.stage() == Conn::Stage::parked) (op & 16) ? conn.tell_parked() : conn.admit(&user, 0);
        break;
      case 10: {
        FrameHeader h;
        h.type = FrameType::ack;
        conn.send_control(h, (op & 16) ? "a reason" : "");
        break;
      }
      default:
        if (op > 240) ::shutdown(peer, SHUT_WR);
        if (op < 20 && conn.stage() == Conn::Stage::parked) conn.refuse("no");
    }
  }
  world.proven = nullptr;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static World* const world = new World;  // its thread serves the whole run
  if (size < 2 || size > 8192) return 0;
  Cursor in(data, size);
  const uint8_t kind = in.byte();
  const bool dialled = (kind & 1) != 0;
  int ends[2];
  must(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "a socket pair");
  {
    const std::lock_guard lock(world->transport.mutex());
    User user((kind & 4) != 0);
    const auto conn = dialled ? std::make_unique<Conn>(world->transport, ends[0], 0, kNobody, hello(), kKey, &user, 0)
                              : std::make_unique<Conn>(world->transport, ends[0], 0, kNobody);
    if (dialled) conn->on_event(EPOLLOUT);
    if ((kind & 2) != 0) {
      shake(*conn, ends[1], dialled);
      if (!dialled && (kind & 8) != 0) conn->admit(&user, 0);
    }
    run(*conn, user, ends[1], in, *world);
    conn->close((kind & 16) != 0);
  }
  ::close(ends[1]);
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  // Steps: give n bytes, then an event.
  const auto given = [](std::string_view text) {
    std::string out;
    for (size_t at = 0; at < text.size(); at += 200) {
      const std::string_view part = text.substr(at, 200);
      out += '\0';
      out += static_cast<char>(part.size());
      out.append(part);
      out += '\3';
    }
    return out;
  };
  std::vector<std::string> out;
  std::string frames;
  for (int type = 1; type <= 12; ++type) {
    FrameHeader h;
    h.type = static_cast<FrameType>(type);
    h.generation = 1;
    h.length = type == 1 ? 300 : type == 5 || (type >= 7 && type <= 9) ? 9 : 0;  // `have` may not have a text, some must
    h.total = type == 1 ? 300 : 0;
    std::string one(FrameHeader::kSize + h.length, 'x');
    h.write(reinterpret_cast<unsigned char*>(one.data()));
    for (const char kind : {'\2', '\3', '\12', '\13', '\16', '\17'}) out.push_back(kind + given(one) + "\6\7\20");
    frames += one;
  }
  out.push_back('\12' + given(frames) + "\x1b\x1f\5\10");
  out.push_back('\3' + given(frames) + "\x1b\x1f\5\10");
  Challenge c;
  c.nonce = "0123456789abcdef";
  std::string greeting(Challenge::kSize, '\0');
  c.write(reinterpret_cast<unsigned char*>(greeting.data()));
  out.push_back('\1' + given(greeting) + given(Answer{AnswerCode::parked, ""}.write(kKey, c, hello())));
  out.push_back('\0' + given(hello().write(kKey, c)));
  out.push_back('\2' + std::string("\x09\x19\x0b\x03"));
  out.push_back('\0' + given("GET / HTTP/1.1\r\nHost: x\r\n\r\n"));
  return out;
}
