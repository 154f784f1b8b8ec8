-- Wireshark dissectors for vnet: the interconnect's packets, over UDP and in raw Ethernet frames, and control frames (docs/interconnect.md), and the native
-- encapsulation of links.
--
--     tshark -X lua_script:vnet.lua -i eth0 -Y vnet_rdma
--
-- A heuristic dissector recognizes interconnect packets on any UDP port; at those of another protocol, such as 7000 to 7009 (AFS), pass
-- -d udp.port==7000,vnet_rdma, and -o tcp.try_heuristic_first:TRUE for connections that stand in for UDP. Links use UDP port 9000 by default; for another port
-- choose "Decode As", or pass -d udp.port==9100,vnet. With UDP segmentation offload, a capture shows several datagrams as one, and
-- Wireshark dissects only the first of them. Disable the offload while capturing (ethtool -K eth0 tx-udp-segmentation off).

local VERSION = 1

-- The interconnect.

local rdma = Proto("vnet_rdma", "vnet interconnect")

local STATUS = {
    [0] = "success", "unreachable", "restarted", "wrong key, range or access", "not ready", "truncated", "cancelled",
    "deadline", "violation of the protocol",
}
local SUBJECTS = { [0] = "operation", "pull", "message not ready" }
local CHANGES = {
    [0] = "minimum", "maximum", "sum", "product", "logical or", "logical and", "bitwise or", "bitwise and",
    "logical exclusive or", "bitwise exclusive or", "read", "write", "swap if equal", "swap if not equal",
    "swap if less or equal", "swap if less", "swap if greater or equal", "swap if greater", "swap of masked bits",
}
local TYPES = { [0] = "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f32", "f64" }

local f = {
    version = ProtoField.uint8("vnet_rdma.version", "Version", base.DEC, nil, 0xf0),
    flags = ProtoField.uint8("vnet_rdma.flags", "Flags", base.HEX),
    failures = ProtoField.uint16("vnet_rdma.failures", "Failures before the acknowledgement"),
    session = ProtoField.uint32("vnet_rdma.session", "Session", base.HEX),
    number = ProtoField.uint32("vnet_rdma.number", "Number"),
    ack = ProtoField.uint32("vnet_rdma.ack", "Acknowledgement"),
    map = ProtoField.bytes("vnet_rdma.map", "Map of arrivals"),
    epoch = ProtoField.uint64("vnet_rdma.epoch", "Epoch"),
    channel = ProtoField.uint32("vnet_rdma.channel", "Channel"),
    answer = ProtoField.uint32("vnet_rdma.answer", "Session for the answer", base.HEX),
    window = ProtoField.uint32("vnet_rdma.window", "Window"),
    datagram = ProtoField.uint16("vnet_rdma.datagram", "Largest datagram"),
    to = ProtoField.uint16("vnet_rdma.to", "Target endpoint"),
    from = ProtoField.uint16("vnet_rdma.from", "Origin endpoint"),
    op = ProtoField.uint32("vnet_rdma.op", "Operation"),
    seq = ProtoField.uint32("vnet_rdma.seq", "Message number"),
    total = ProtoField.uint32("vnet_rdma.total", "Length"),
    total_long = ProtoField.uint64("vnet_rdma.total_long", "Length"),
    behind = ProtoField.uint32("vnet_rdma.behind", "Bytes behind this packet"),
    place = ProtoField.uint32("vnet_rdma.place", "Offset in the message"),
    tag = ProtoField.uint64("vnet_rdma.tag", "Tag", base.HEX),
    key = ProtoField.uint64("vnet_rdma.key", "Tag, key or operation", base.HEX),
    at = ProtoField.uint64("vnet_rdma.at", "Offset"),
    data = ProtoField.uint64("vnet_rdma.data", "Immediate data", base.HEX),
    pull = ProtoField.uint32("vnet_rdma.pull", "Pull"),
    len = ProtoField.uint32("vnet_rdma.len", "Length"),
    offset = ProtoField.uint64("vnet_rdma.offset", "Offset in the pull"),
    subject = ProtoField.uint8("vnet_rdma.subject", "Subject", base.DEC, SUBJECTS),
    status = ProtoField.uint8("vnet_rdma.status", "Status", base.DEC, STATUS),
    limit = ProtoField.uint32("vnet_rdma.limit", "First message not taken"),
    change = ProtoField.uint8("vnet_rdma.change", "Change", base.DEC, CHANGES),
    type = ProtoField.uint8("vnet_rdma.type", "Type", base.DEC, TYPES),
    count = ProtoField.uint16("vnet_rdma.count", "Count"),
    name = ProtoField.bytes("vnet_rdma.name", "Process's name at its daemon"),
    secret = ProtoField.bytes("vnet_rdma.secret", "Secret of the channel"),
    payload = ProtoField.bytes("vnet_rdma.payload", "Payload"),
}

-- Packet kinds: name, the fields that follow the common header with their sizes in bytes, and whether a payload follows.
local HELLO = { { f.epoch, 8 }, { f.channel, 4 }, { f.answer, 4 }, { f.window, 4 }, { f.datagram, 2 } }
local KINDS = {
    [0] = { "HELLO", HELLO },
    [1] = { "WELCOME", HELLO },
    [2] = { "RESET", {} },
    [3] = { "ACK", {} },
    [4] = { "NOOP", {} },
    [5] = {
        "MESSAGE",
        { { f.to, 2 }, { f.from, 2 }, { f.op, 4 }, { f.seq, 4 }, { f.total, 4 }, { f.place, 4 }, { f.tag, 8 }, { f.data, 8 } },
        true,
    },
    [6] = {
        "WRITE",
        { { f.to, 2 }, { f.from, 2 }, { f.op, 4 }, { f.seq, 4 }, { f.behind, 4 }, { f.key, 8 }, { f.at, 8 }, { f.data, 8 } },
        true,
    },
    [7] = {
        "OFFER",
        { { f.to, 2 }, { f.from, 2 }, { f.op, 4 }, { f.seq, 4 }, { f.total_long, 8 }, { f.key, 8 }, { f.at, 8 }, { f.data, 8 } },
    },
    [8] = { "PULL", { { f.to, 2 }, { f.pull, 4 }, { f.len, 4 }, { f.key, 8 }, { f.at, 8 }, { f.offset, 8 } } },
    [9] = { "DATA", { { f.pull, 4 }, { f.offset, 8 } }, true },
    [10] = { "END", { { f.subject, 1 }, { f.status, 1 }, { f.to, 2 }, { f.op, 4 }, { f.seq, 4 } } },
    [11] = { "CREDIT", { { f.to, 2 }, { f.limit, 4 } } },
    [12] = {
        "ATOMIC",
        { { f.to, 2 }, { f.from, 2 }, { f.op, 4 }, { f.change, 1 }, { f.type, 1 }, { f.count, 2 }, { f.key, 8 }, { f.at, 8 } },
        true,
    },
    [13] = { "FOUND", { { f.op, 4 } }, true },
    [14] = { "INVITE", { { f.name, 16 }, { f.secret, 16 } } },
    [15] = {
        "PLACED",
        { { f.to, 2 }, { f.from, 2 }, { f.op, 4 }, { f.seq, 4 }, { f.behind, 4 }, { f.key, 8 }, { f.at, 8 }, { f.data, 8 } },
    },
}
local FLAGS = {
    { 0x01, "map", "A map of arrivals follows" },
    { 0x02, "ack_soon", "Acknowledge soon" },
    { 0x04, "congestion", "Packets marked by ECN arrived" },
    { 0x08, "tagged", "The tag counts" },
    { 0x10, "data", "The immediate data counts, or what was found is wanted" },
    { 0x20, "memory", "A write is offered, or a region is read; in a handshake: arrivals are ordered" },
    { 0x40, "resume", "First message after not ready; in a handshake: parts are taken" },
    { 0x80, "failure", "The end is among the failures" },
}
local names = {}
for number, kind in pairs(KINDS) do
    names[number] = kind[1]
end
f.kind = ProtoField.uint8("vnet_rdma.kind", "Kind", base.DEC, names, 0x0f)
local all = {}
for _, field in pairs(f) do
    all[#all + 1] = field
end
for _, flag in ipairs(FLAGS) do
    flag.field = ProtoField.bool("vnet_rdma.flags." .. flag[2], flag[3], 8, nil, flag[1])
    all[#all + 1] = flag.field
end

-- Sealed packets, and those that make keys new: the high bits of the first byte are another version.
local SEALING = 2
local HEADER, PARTS_MAX = 16, 16
local SEALED = {
    [0] = { "SEALED", { { "part", 2, 1 }, { "last", 3, 1 }, { "id", 4, 4 }, { "number", 8, 8 } }, 32, "encrypted" },
    [1] = { "OPEN", { { "id", 4, 4 }, { "nonce", 8, 16 } }, 24 },
    [2] = { "AGREE", { { "epoch", 1, 1 }, { "id", 4, 4 }, { "own", 8, 4 }, { "nonce", 12, 16 } }, 28 },
    [3] = { "ASK", { { "id", 4, 4 } }, 8 },
}
local seal_names = {}
for number, kind in pairs(SEALED) do
    seal_names[number] = kind[1]
end
local s = {
    kind = ProtoField.uint8("vnet_rdma.seal.kind", "Kind", base.DEC, seal_names, 0x0f),
    epoch = ProtoField.uint8("vnet_rdma.seal.epoch", "Epoch of the link's keys"),
    id = ProtoField.uint32("vnet_rdma.seal.id", "Key id", base.HEX),
    own = ProtoField.uint32("vnet_rdma.seal.own", "Key id of the sender", base.HEX),
    part = ProtoField.uint8("vnet_rdma.seal.part", "Part"),
    last = ProtoField.uint8("vnet_rdma.seal.last", "Last part"),
    number = ProtoField.uint64("vnet_rdma.seal.number", "Number"),
    nonce = ProtoField.bytes("vnet_rdma.seal.nonce", "Random number"),
    encrypted = ProtoField.bytes("vnet_rdma.seal.encrypted", "Encrypted packet"),
    tag = ProtoField.bytes("vnet_rdma.seal.tag", "Tag"),
}
for _, field in pairs(s) do
    all[#all + 1] = field
end
rdma.fields = all

-- Returns the kind of a packet of sealing, or nil.
local function sealing(buffer)
    if buffer:len() < 8 or buffer(0, 1):bitfield(0, 4) ~= SEALING then
        return nil
    end
    local kind = SEALED[buffer(0, 1):bitfield(4, 4)]
    local part, last = buffer(2, 1):uint(), buffer(3, 1):uint()
    if part > last or last >= PARTS_MAX or (last > 0 and not (kind and kind[4])) then
        return nil
    end
    -- A part has at least one byte behind the header.
    local is_whole = kind and (buffer:len() == kind[3] or (kind[4] and buffer:len() > (last > 0 and HEADER or kind[3])))
    local epoch = buffer(1, 1):uint()
    return is_whole and (epoch == 0 or (kind[1] == "AGREE" and epoch < 4)) and kind or nil
end

local function dissect_sealing(kind, buffer, pinfo, tree)
    pinfo.cols.protocol = "VNET-RDMA"
    local text = string.format("%s key=0x%08x", kind[1], buffer(4, 4):uint())
    local last = kind[4] and buffer(3, 1):uint() or 0
    if last > 0 then
        text = text .. string.format(" number=%s part=%u/%u", buffer(8, 8):uint64(), buffer(2, 1):uint() + 1, last + 1)
        text = text .. string.format(" bytes=%u", buffer:len() - HEADER)
    elseif kind[4] then
        text = text .. string.format(" number=%s encrypted=%u", buffer(8, 8):uint64(), buffer:len() - 32)
    end
    pinfo.cols.info = text
    local own = tree:add(rdma, buffer(), "vnet interconnect, " .. text)
    own:add(s.kind, buffer(0, 1))
    for _, field in ipairs(kind[2]) do
        own:add(s[field[1]], buffer(field[2], field[3]))
    end
    if last > 0 then
        own:add(s.encrypted, buffer(HEADER))
    elseif kind[4] then
        if buffer:len() > 32 then
            own:add(s.encrypted, buffer(16, buffer:len() - 32))
        end
        own:add(s.tag, buffer(buffer:len() - 16, 16))
    end
    return buffer:len()
end

local COMMON, MAP = 16, 32

-- Returns the size of the header in bytes, or nil if the buffer holds no interconnect packet.
local function header_len(buffer)
    if buffer:len() < COMMON or buffer(0, 1):bitfield(0, 4) ~= VERSION then
        return nil
    end
    local kind = KINDS[buffer(0, 1):bitfield(4, 4)]
    if not kind then
        return nil
    end
    local len = COMMON + (buffer(1, 1):bitfield(7, 1) == 1 and MAP or 0)
    for _, field in ipairs(kind[2]) do
        len = len + field[2]
    end
    if buffer:len() < len or (buffer:len() > len and not kind[3]) then
        return nil
    end
    return len
end

function rdma.dissector(buffer, pinfo, tree)
    local sealed = sealing(buffer)
    if sealed then
        return dissect_sealing(sealed, buffer, pinfo, tree)
    end
    local len = header_len(buffer)
    if not len then
        return 0
    end
    local kind = KINDS[buffer(0, 1):bitfield(4, 4)]
    pinfo.cols.protocol = "VNET-RDMA"
    local text = string.format("%s number=%u ack=%u", kind[1], buffer(8, 4):uint(), buffer(12, 4):uint())
    if buffer:len() > len then
        text = text .. string.format(" bytes=%u", buffer:len() - len)
    end
    pinfo.cols.info = text
    local own = tree:add(rdma, buffer(), "vnet interconnect, " .. text)
    own:add(f.version, buffer(0, 1))
    own:add(f.kind, buffer(0, 1))
    local flags = own:add(f.flags, buffer(1, 1))
    for _, flag in ipairs(FLAGS) do
        flags:add(flag.field, buffer(1, 1))
    end
    own:add(f.failures, buffer(2, 2))
    own:add(f.session, buffer(4, 4))
    own:add(f.number, buffer(8, 4))
    own:add(f.ack, buffer(12, 4))
    local at = COMMON
    if buffer(1, 1):bitfield(7, 1) == 1 then
        own:add(f.map, buffer(at, MAP))
        at = at + MAP
    end
    for _, field in ipairs(kind[2]) do
        own:add(field[1], buffer(at, field[2]))
        at = at + field[2]
    end
    if buffer:len() > at then
        own:add(f.payload, buffer(at))
    end
    return buffer:len()
end

-- The native encapsulation of links.

local native = Proto("vnet", "vnet link")

local TYPES_OF_LINKS = { [0] = "frame", "bundle", "probe", "probe reply", "keepalive" }
local n = {
    version = ProtoField.uint8("vnet.version", "Version", base.DEC, nil, 0xf0),
    type = ProtoField.uint8("vnet.type", "Type", base.DEC, TYPES_OF_LINKS, 0x0f),
    last = ProtoField.bool("vnet.last", "Last fragment", 8, nil, 0x01),
    offload = ProtoField.bool("vnet.offload", "Offload metadata", 8, nil, 0x02),
    sealed = ProtoField.bool("vnet.sealed", "Sealed", 8, nil, 0x04),
    hops = ProtoField.uint8("vnet.hops", "Hops taken", base.DEC, nil, 0x38),
    epoch = ProtoField.uint8("vnet.epoch", "Key epoch", base.DEC, nil, 0xc0),
    index = ProtoField.uint16("vnet.index", "Fragment"),
    network = ProtoField.uint24("vnet.network", "Network"),
    queue = ProtoField.uint8("vnet.queue", "Receive queue"),
    number = ProtoField.uint64("vnet.number", "Datagram number"),
    metadata = ProtoField.bytes("vnet.metadata", "Offload metadata"),
    length = ProtoField.uint16("vnet.length", "Length in the bundle"),
    payload = ProtoField.bytes("vnet.payload", "Payload"),
}
local fields = {}
for _, field in pairs(n) do
    fields[#fields + 1] = field
end
native.fields = fields

local HEADER, METADATA = 16, 12
local ethernet = Dissector.get("eth_withoutfcs")

-- Dissects a whole Ethernet frame, which offload metadata may precede.
local function frame(buffer, has_offload, pinfo, own, tree)
    if has_offload and buffer:len() >= METADATA then
        own:add(n.metadata, buffer(0, METADATA))
        buffer = buffer(METADATA):tvb()
    end
    if buffer:len() > 0 then
        ethernet:call(buffer, pinfo, tree)
    end
end

function native.dissector(buffer, pinfo, tree)
    if buffer:len() < HEADER or buffer(0, 1):bitfield(0, 4) ~= VERSION then
        return 0
    end
    local kind = TYPES_OF_LINKS[buffer(0, 1):bitfield(4, 4)]
    if not kind then
        return 0
    end
    pinfo.cols.protocol = "VNET"
    pinfo.cols.info = kind
    local own = tree:add(native, buffer(0, HEADER), "vnet link, " .. kind)
    own:add(n.version, buffer(0, 1))
    own:add(n.type, buffer(0, 1))
    own:add(n.last, buffer(1, 1))
    own:add(n.offload, buffer(1, 1))
    own:add(n.sealed, buffer(1, 1))
    own:add(n.hops, buffer(1, 1))
    own:add(n.epoch, buffer(1, 1))
    own:add(n.index, buffer(2, 2))
    own:add(n.network, buffer(4, 3))
    own:add(n.queue, buffer(7, 1))
    own:add(n.number, buffer(8, 8))
    local rest = buffer:len() - HEADER
    if rest == 0 then
        return HEADER
    end
    local flags = buffer(1, 1)
    local last, offload, sealed = flags:bitfield(7, 1) == 1, flags:bitfield(6, 1) == 1, flags:bitfield(5, 1) == 1
    local index = buffer(2, 2):uint()
    if sealed or (kind ~= "frame" and kind ~= "bundle") or (kind == "frame" and not (last and index == 0)) then
        own:add(n.payload, buffer(HEADER))
    elseif kind == "frame" then
        frame(buffer(HEADER):tvb(), offload, pinfo, own, tree)
    else
        local at = HEADER
        while at + 2 <= buffer:len() do
            local len = buffer(at, 2):uint()
            own:add(n.length, buffer(at, 2))
            if len == 0 or at + 2 + len > buffer:len() then
                break
            end
            frame(buffer(at + 2, len):tvb(), offload, pinfo, own, tree)
            at = at + 2 + len
        end
    end
    return buffer:len()
end

-- Control frames between the helper in a virtual machine and vnetd.

local vm = Proto("vnet_rdma_vm", "vnet interconnect in virtual machines")

local VM_COMMON = 32
local STATES = { [0] = "more", "used", "refused" }
local v = {
    kind = ProtoField.uint8("vnet_rdma_vm.kind", "Kind", base.DEC),
    attachment = ProtoField.uint64("vnet_rdma_vm.attachment", "Attachment", base.HEX),
    secret = ProtoField.bytes("vnet_rdma_vm.secret", "Secret"),
    ip = ProtoField.ipv6("vnet_rdma_vm.ip", "Address"),
    port = ProtoField.uint16("vnet_rdma_vm.port", "Port"),
    reason = ProtoField.uint8("vnet_rdma_vm.reason", "Reason"),
    memory = ProtoField.uint32("vnet_rdma_vm.memory", "Memory", base.HEX),
    bytes = ProtoField.uint64("vnet_rdma_vm.bytes", "Length"),
    total = ProtoField.uint16("vnet_rdma_vm.total", "Runs in all"),
    first = ProtoField.uint16("vnet_rdma_vm.first", "Runs in earlier frames"),
    addr = ProtoField.uint64("vnet_rdma_vm.addr", "Guest physical address", base.HEX),
    pages = ProtoField.uint32("vnet_rdma_vm.pages", "Pages"),
    next = ProtoField.uint16("vnet_rdma_vm.next", "Next run"),
    state = ProtoField.uint8("vnet_rdma_vm.state", "State", base.DEC, STATES),
    rung = ProtoField.uint32("vnet_rdma_vm.rung", "Rung"),
    heard = ProtoField.uint32("vnet_rdma_vm.heard", "Heard"),
    asks = ProtoField.bool("vnet_rdma_vm.asks", "Wants an answer"),
    mac = ProtoField.ether("vnet_rdma_vm.mac", "MAC address"),
    length = ProtoField.uint16("vnet_rdma_vm.length", "Length of the datagram"),
}
local VM_ADDRESS = { { v.ip, 16 }, { nil, 4 }, { v.port, 2 }, { nil, 1 } }
-- Name and the fields with their sizes in bytes.
local VM_KINDS = {
    { "OPEN", { { v.ip, 16 }, { nil, 4 }, { v.port, 2 }, { nil, 9 } } },
    { "OPENED", VM_ADDRESS },
    { "DECLINED", { { v.reason, 1 }, { nil, 4 } } },
    { "SHARE", { { v.memory, 4 }, { v.bytes, 8 }, { v.total, 2 }, { v.first, 2 }, { nil, 2 } } },
    { "SHARED", { { v.memory, 4 }, { v.next, 2 }, { v.state, 1 } } },
    { "RING", { { v.rung, 4 }, { v.heard, 4 }, { v.asks, 1 } } },
    { "ASK", { { v.ip, 16 } } },
    { "NEIGHBOUR", { { v.ip, 16 }, { v.mac, 6 } } },
    { "CLOSE", {} },
    { "CLOSED", {} },
    { "DATAGRAM", { { v.ip, 16 }, { nil, 4 }, { v.port, 2 }, { nil, 1 }, { v.length, 2 } } },
}
local vm_fields = {}
for _, field in pairs(v) do
    vm_fields[#vm_fields + 1] = field
end
vm.fields = vm_fields

function vm.dissector(buffer, pinfo, tree)
    if buffer:len() < VM_COMMON or buffer(0, 4):string() ~= "vrdm" or buffer(4, 1):uint() ~= 1 then
        return 0
    end
    local kind = VM_KINDS[buffer(5, 1):uint()]
    if not kind then
        return 0
    end
    pinfo.cols.protocol = "VNET-RDMA-VM"
    pinfo.cols.info = kind[1]
    local own = tree:add(vm, buffer(), "vnet interconnect in virtual machines, " .. kind[1])
    own:add(v.kind, buffer(5, 1)):append_text(" (" .. kind[1] .. ")")
    own:add(v.attachment, buffer(8, 8))
    own:add(v.secret, buffer(16, 16))
    local at = VM_COMMON
    for _, field in ipairs(kind[2]) do
        if at + field[2] > buffer:len() then
            return buffer:len()
        end
        if field[1] then
            own:add(field[1], buffer(at, field[2]))
        end
        at = at + field[2]
    end
    if kind[1] == "SHARE" then
        for _ = 1, buffer(at - 2, 2):uint() do
            if at + 12 > buffer:len() then
                break
            end
            own:add(v.addr, buffer(at, 8)):append_text(", " .. buffer(at + 8, 4):uint() .. " pages")
            own:add(v.pages, buffer(at + 8, 4))
            at = at + 12
        end
    end
    if kind[1] == "DATAGRAM" then
        local length = buffer(at - 2, 2):uint()
        if length > 0 and at + length <= buffer:len() then
            rdma.dissector(buffer(at, length):tvb(), pinfo, tree)
        end
    end
    return buffer:len()
end

-- Packets in raw Ethernet frames, which share the ethertype with control frames.

local ether = Proto("vnet_rdma_ether", "vnet interconnect in raw Ethernet")

local ETHER_HEADER = 10
local e = {
    to = ProtoField.uint16("vnet_rdma_ether.to", "Destination port"),
    from = ProtoField.uint16("vnet_rdma_ether.from", "Source port"),
    length = ProtoField.uint16("vnet_rdma_ether.length", "Length of the packet"),
    padding = ProtoField.bytes("vnet_rdma_ether.padding", "Padding"),
}
ether.fields = { e.to, e.from, e.length, e.padding }

function ether.dissector(buffer, pinfo, tree)
    if buffer:len() <= ETHER_HEADER or buffer(0, 4):string() ~= "vrde" then
        return vm.dissector(buffer, pinfo, tree)
    end
    local length = buffer(8, 2):uint()
    pinfo.cols.protocol = "VNET-RDMA-ETHER"
    pinfo.cols.info = string.format("%u -> %u length=%u", buffer(6, 2):uint(), buffer(4, 2):uint(), length)
    local own = tree:add(ether, buffer(0, ETHER_HEADER), "vnet interconnect in raw Ethernet")
    own:add(e.to, buffer(4, 2))
    own:add(e.from, buffer(6, 2))
    own:add(e.length, buffer(8, 2))
    local rest = buffer:len() - ETHER_HEADER
    if length == 0 or length > rest then
        return ETHER_HEADER
    end
    if rest > length then
        own:add(e.padding, buffer(ETHER_HEADER + length))
    end
    rdma.dissector(buffer(ETHER_HEADER, length):tvb(), pinfo, tree)
    return buffer:len()
end

DissectorTable.get("ethertype"):add(0x88b5, ether)

local ports = DissectorTable.get("udp.port")
ports:add(9000, native)
ports:add_for_decode_as(rdma)
-- TCP connections that stand in for UDP: magic and secret in each direction, then records. A probe by UDP is a magic and a secret, too.

local tcp = Proto("vnet_rdma_tcp", "vnet interconnect over TCP")

local BOUNCE, PREFACE, LENGTH = "vnet-rdma-bounce", 24, 4
local CONTROLS = { "a probe has arrived by UDP", "no answers by UDP" }
local t = {
    magic = ProtoField.string("vnet_rdma_tcp.magic", "Magic"),
    secret = ProtoField.bytes("vnet_rdma_tcp.secret", "Secret of the sender"),
    length = ProtoField.uint32("vnet_rdma_tcp.length", "Length of the record"),
    control = ProtoField.uint8("vnet_rdma_tcp.control", "Control record", base.DEC, CONTROLS),
}
tcp.fields = { t.magic, t.secret, t.length, t.control }

local function is_bounce(buffer)
    return buffer:len() >= #BOUNCE and buffer(0, #BOUNCE):string() == BOUNCE
end

local function preface(buffer, pinfo, tree)
    local own = tree:add(tcp, buffer(), "vnet interconnect over TCP")
    own:add(t.magic, buffer(0, #BOUNCE))
    own:add(t.secret, buffer(#BOUNCE))
    pinfo.cols.protocol = "VNET-RDMA"
    return buffer:len()
end

-- No record is as long as the magic would say.
local function record_len(buffer, _, offset)
    local first = buffer(offset, LENGTH)
    return first:string() == BOUNCE:sub(1, LENGTH) and PREFACE or LENGTH + first:uint()
end

local function record(buffer, pinfo, tree)
    if is_bounce(buffer) then
        return preface(buffer, pinfo, tree)
    end
    local own = tree:add(tcp, buffer(0, LENGTH), "vnet interconnect over TCP")
    own:add(t.length, buffer(0, LENGTH))
    if buffer:len() == LENGTH + 1 then
        own:add(t.control, buffer(LENGTH))
    elseif buffer:len() > LENGTH then
        rdma.dissector(buffer(LENGTH):tvb(), pinfo, tree)
    end
    return buffer:len()
end

function tcp.dissector(buffer, pinfo, tree)
    dissect_tcp_pdus(buffer, tree, LENGTH, record_len, record)
    return buffer:len()
end

tcp:register_heuristic("tcp", function(buffer, pinfo, tree)
    if not is_bounce(buffer) then
        return false
    end
    pinfo.conversation = tcp
    tcp.dissector(buffer, pinfo, tree)
    return true
end)
tcp:register_heuristic("udp", function(buffer, pinfo, tree)
    return buffer:len() == PREFACE and is_bounce(buffer) and preface(buffer, pinfo, tree) > 0
end)

rdma:register_heuristic("udp", function(buffer, pinfo, tree)
    return (sealing(buffer) or header_len(buffer)) ~= nil and rdma.dissector(buffer, pinfo, tree) > 0
end)
