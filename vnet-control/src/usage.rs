//! Usage texts of the control language, for `HELP`, completion and the reference.

/// One command's usage.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// Leading keywords.
    pub words: &'static str,
    /// The whole line. Upper-case words after the keywords are placeholders; brackets enclose optional parts.
    pub syntax: &'static str,
    /// Alternative keywords.
    pub synonyms: &'static str,
    /// Purpose of the command.
    pub help: &'static str,
}

const fn usage(
    words: &'static str,
    syntax: &'static str,
    synonyms: &'static str,
    help: &'static str,
) -> Usage {
    Usage { words, syntax, synonyms, help }
}

/// Every command of the language.
pub const COMMANDS: &[Usage] = &[
    usage(
        "LINK ADD",
        "LINK ADD IP PORT [udp|tcp] [KEY=VALUE ...]",
        "EDGE ADD",
        "A link to the host at IP, with the keys of [[link]]; udp: in VNET/P's own encapsulation (vnet), in clear text, unless \
         encapsulation= says otherwise; then it needs sealed=true or trusted=true, as tcp does",
    ),
    usage(
        "LINK DEL",
        "LINK DEL INDEX",
        "EDGE DEL, LINK DELETE, LINK REMOVE",
        "Removes a link that no route names",
    ),
    usage(
        "LINKS?",
        "LINKS? [FIRST]",
        "LINKS, LINK LIST, EDGES?",
        "Lists links: index, IP, port, transport, name, encapsulation, state",
    ),
    usage(
        "ROUTE ADD",
        "ROUTE ADD SRC DST edge|interface ID any|edge|interface [ID] [network=N]",
        "link for edge, DEVICE for interface",
        "Frames from SRC to DST (a MAC, not-MAC, any or none) that came from there go here. A link's ID is its IP, IP:PORT or \
         name, an interface's its MAC or name",
    ),
    usage("ROUTE DEL", "ROUTE DEL INDEX", "ROUTE DELETE, ROUTE REMOVE", "Removes a route"),
    usage(
        "ROUTE MOVE",
        "ROUTE MOVE MAC edge|interface ID [network=N]",
        "",
        "All routes to MAC lead to that link or interface, from one frame to the next: for a machine that has moved. They get \
         new indices",
    ),
    usage(
        "ROUTES?",
        "ROUTES? [FIRST]",
        "ROUTES, ROUTE LIST",
        "Lists routes: index, then what ROUTE ADD takes",
    ),
    usage(
        "INTERFACE ADD",
        "INTERFACE ADD NAME veth|tap|vhost-user|local KEY=VALUE ...",
        "DEVICE ADD",
        "An interface with the keys of [[interface]]: device=, netns=, socket=, mac=, mtu= and so on",
    ),
    usage(
        "INTERFACE DEL",
        "INTERFACE DEL INDEX",
        "DEVICE DEL, INTERFACE DELETE, INTERFACE REMOVE",
        "Removes an interface that no route names",
    ),
    usage(
        "INTERFACES?",
        "INTERFACES? [FIRST]",
        "INTERFACES, INTERFACE LIST, DEVICES?",
        "Lists interfaces: index, MAC, name, kind, state, MTU, network",
    ),
    usage(
        "STATS?",
        "STATS? [FIRST]",
        "STATS",
        "Counters of every port, drops by reason, and where all frames went; FIRST counts the lines",
    ),
    usage("HELP", "HELP", "?", "Lists the commands"),
    usage("HELLO", "HELLO [ANYTHING]", "", "Says who answers"),
    usage("DONE", "DONE", "QUIT, EXIT", "Ends the session"),
];
