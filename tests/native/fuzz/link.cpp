// Both ends of a link under any frames that a peer with the token can send, of every type and in any order, and any word
// of heartbeats about their connections. The receiver's connections are real (over socket pairs); what a sender is told
// reaches it as its connections would hand it over.
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <mutex>

#include "fuzz.h"
#include "link.h"

using namespace ftar;

namespace {

const std::string kKey = link_key("a token of the fuzzer", "fuzz");
constexpr uint64_t kNobody = 1ull << 40;  // ids of no connections of the transport: they are driven from here only
constexpr int kRails = 2;
constexpr size_t kRoom = 1 << 14;

class Owner final : public LinkOwner, public RecvSink {
 public:
  void link_ready(LinkEnd&) override {}
  void link_rail(LinkEnd&, const RailChange& change) override { must(!change.reason.empty(), "a change has a reason"); }
  void link_moved(LinkEnd& link, int slot, const std::string&) override { known(link, slot); }
  void link_warns(LinkEnd& link, int slot, const std::string&) override { known(link, slot); }
  void link_unreachable(LinkEnd&, const std::string& reason) override { must(!reason.empty(), "for a reason"); }
  void link_over(LinkEnd& link, const std::string& reason, bool) override {
    must(link.closed() && !reason.empty(), "a link that is over is closed, for a reason");
    ++over;
  }
  Placement place(const FrameHeader& m) override {
    if (m.total > kRoom) return {Placement::Kind::refused, nullptr, "too large"};
    if (m.seq >= places) return {Placement::Kind::later, nullptr, nullptr};
    return {Placement::Kind::here, room_, nullptr};
  }
  void received(const FrameHeader& m) override { must(m.seq == next_++, "messages are handed out in order, each once"); }
  uint64_t places = 2;
  int over = 0;

 private:
  static void known(const LinkEnd& link, int slot) {
    must(slot >= 0 && slot < static_cast<int>(link.rails().size()), "a rail of the link");
  }
  std::byte room_[kRoom] = {};
  uint64_t next_ = 0;
};

struct World {
  Transport transport;
  World() : transport(kKey, Options(), {{"rail0", "", "127.0.0.1"}, {"rail1", "", "127.0.0.2"}}) {
    transport.start([](Conn&) {}, [](double now) { return now + 1000; });
  }
};

LinkName name() { return {"epochepochepoch!", "r0", "r1", 3, 4}; }

std::vector<LinkRail> rails() {
  std::vector<LinkRail> out;
  for (int i = 0; i < kRails; ++i) out.push_back({i, "rail" + std::to_string(i), parse_address("127.0.0." + std::to_string(i + 1), 9, "")});
  return out;
}

Hello hello(int rail) {
  Hello h;
  h.epoch = name().epoch;
  h.nonce = "noncenoncenonce!";
  h.from_incarnation = 3;
  h.to_incarnation = 4;
  h.from = "r0";
  h.to = "r1";
  h.rail = "rail" + std::to_string(rail);
  return h;
}

// A peer's end of a connection to the receiver, its handshake made.
struct Wire {
  std::unique_ptr<Conn> conn;
  int peer = -1;
  Wire(Transport& transport, int rail) {
    int ends[2];
    must(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "a socket pair");
    peer = ends[1];
    conn = std::make_unique<Conn>(transport, ends[0], rail, kNobody + static_cast<uint64_t>(rail));
    unsigned char said[Challenge::kSize];
    must(::recv(peer, said, sizeof said, 0) == static_cast<ssize_t>(sizeof said), "an acceptor speaks first");
    Challenge c;
    must(c.parse(said) == nullptr, "our own challenge is in order");
    give(hello(rail).write(kKey, c));
  }
  ~Wire() {
    conn->close(false);
    ::close(peer);
  }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;
  void give(std::string_view text) {
    [[maybe_unused]] const ssize_t n = ::send(peer, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    conn->on_event(EPOLLIN);
    char sink[4096];
    while (::recv(peer, sink, sizeof sink, MSG_DONTWAIT) > 0) {
    }
  }
};

FrameHeader header(Cursor* in, uint64_t tag) {
  FrameHeader h;
  h.type = static_cast<FrameType>(1 + in->byte() % 9);
  const uint8_t shape = in->byte();
  h.flags = shape & 7;
  h.rail = (shape >> 3) % 4;
  h.tag = (shape & 0xe0) == 0xe0 ? tag + 1 : tag;
  h.generation = in->byte() % 16;
  h.seq = in->byte() % 8 + (h.type == FrameType::endpoint ? in->byte() * 257u : 0u);
  h.offset = in->byte() * 8u;
  h.total = in->byte() * 8u;
  h.step = in->byte() % 16;
  const bool text = h.type == FrameType::notice || h.type == FrameType::goodbye || h.type == FrameType::endpoint;
  if (h.type == FrameType::open) h.total = h.total * h.total * h.total;
  if (text || h.type == FrameType::data) h.length = in->byte();
  return h;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static World* const world = new World;  // its thread serves the whole run
  if (size > 4096) return 0;
  Cursor in(data, size);
  const std::lock_guard lock(world->transport.mutex());
  Transport& transport = world->transport;
  Owner to_owner, from_owner;
  // Another name, or each would be taken for the other's peer.
  LinkName away = name();
  away.from_incarnation = 9;
  std::byte bytes[64] = {};
  SendLink send(transport, from_owner, away, rails(), [](const OutMessage&) {});
  RecvLink recv(transport, to_owner, name(), rails(), to_owner);
  Hello named = hello(0);
  const uint64_t recv_tag = link_tag(kKey, named);
  named.from_incarnation = 9;
  const uint64_t send_tag = link_tag(kKey, named);
  std::unique_ptr<Wire> wires[kRails];
  std::vector<std::unique_ptr<Wire>> kept;
  std::unique_ptr<Wire> other = std::make_unique<Wire>(transport, 0);  // what the sender takes for its connection
  double now = Transport::now_ms();
  for (int steps = 0; !in.empty() && steps < 300; ++steps) {
    const uint8_t op = in.byte();
    const int rail = (op >> 4) % kRails;
    auto& wire = wires[rail];
    switch (op % 8) {
      case 0:
        if (recv.closed() || kept.size() > 20) break;
        if (wire != nullptr) kept.push_back(std::move(wire));  // the link still has it
        wire = std::make_unique<Wire>(transport, rail);
        recv.attach(*wire->conn, rail);
        break;
      case 1:
      case 2:
      case 3: {
        const FrameHeader h = header(&in, recv_tag);
        if (wire == nullptr) break;
        std::string frame(FrameHeader::kSize, '\0');
        h.write(reinterpret_cast<unsigned char*>(frame.data()));
        frame.append(in.bytes(h.length));
        frame.resize(FrameHeader::kSize + h.length, 'x');
        wire->give(frame);
        break;
      }
      case 4: {
        FrameHeader h = header(&in, send_tag);
        unsigned char raw[FrameHeader::kSize];
        h.write(raw);
        if (send.closed() || h.parse(raw) != nullptr) break;
        if (h.type == FrameType::data) {
          must(send.data_begins(*other->conn, h).kind == Placement::Kind::refused, "no data comes to a sender");
        } else {
          send.control(*other->conn, h, std::string(in.bytes(h.length)));
        }
        break;
      }
      case 5:
        if (send.closed()) break;
        send.send({bytes, in.byte() % sizeof bytes});
        break;
      case 6: {
        const uint8_t word = in.byte();
        now += word;
        if (word % 4 == 0 && recv.path_on(rail) != nullptr) recv.path_heard(rail, word * 8u, now);
        if (word % 4 == 1) recv.own_echo(rail, word * 8u, now);
        if (word % 4 == 2 && recv.path_on(rail) != nullptr) recv.missing_there(rail, word * 8u, now, now);
        if (word == 7) recv.said_goodbye(word, op);
        break;
      }
      default:
        to_owner.places += op >> 6;
        recv.places_changed(true);
        now += op;
        recv.tick(now);
        transport.paths().tick(now);
    }
  }
  must(to_owner.over <= 1 && from_owner.over <= 1, "a link is over once");
  recv.close("the end", true);
  send.close("the end", true);
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  const auto frame = [](char op, int type, std::string_view fields, std::string_view text = {}) {
    std::string out{op, static_cast<char>(type - 1)};
    out.append(fields);
    if (type == 1 || (type >= 7 && type <= 9)) out.push_back(static_cast<char>(text.size()));
    out.append(text);
    return out;
  };
  // shape, generation, seq, (endpoint: high part of the port), offset, total, step
  const std::string opens = std::string("\0\20", 2) + frame('\1', 3, std::string("\0\1\0\0\20\0", 6)) + frame('\21', 3, std::string("\0\2\0\0\20\0", 6));
  const std::string whole = frame('\1', 1, std::string("\0\1\0\0\2\0", 6), "0123456789abcdef");
  std::vector<std::string> out{opens + whole + "\7\7", opens + frame('\1', 6, std::string("\0\0\0\0\0\0", 6)) + "\27"};
  for (int type = 1; type <= 9; ++type) {
    const bool endpoint = type == 9;
    const std::string fields = std::string(endpoint ? "\10\0\1\37\0\0\0" : "\10\2\0\0\2\0", endpoint ? 7 : 6);
    const std::string_view text = endpoint ? "127.0.0.9" : type == 1 ? "0123456789abcdef" : type >= 7 ? "why" : "";
    for (const char op : {'\1', '\21', '\4'}) out.push_back(opens + "\5\30" + frame(op, type, fields, text) + "\7");
  }
  out.push_back(opens + std::string("\6\0\6\1\26\2\6\4", 8) + "\7" + "\6\7");
  return out;
}
