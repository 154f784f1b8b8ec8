use proptest::prelude::*;

use super::*;

fn console(line: &str) -> Result<Command, LanguageError> {
    parse(Dialect::Console, line)
}

#[test]
fn the_published_language_is_parsed() {
    for (line, want) in [
        ("", ""),
        ("   \t", ""),
        ("# LINK DEL 1", ""),
        ("LINK ADD 10.0.0.2 9000 udp", "LINK ADD 10.0.0.2 9000 udp"),
        ("link add 10.0.0.2 9000", "LINK ADD 10.0.0.2 9000 udp"),
        ("Edge Add fd00::2 9000 TCP", "LINK ADD fd00::2 9000 tcp"),
        (
            "LINK ADD 10.0.0.2 9000 name=h2 networks=1,2 mtu=9000",
            "LINK ADD 10.0.0.2 9000 udp name=h2 networks=1,2 mtu=9000",
        ),
        ("LINK DEL 1", "LINK DEL 1"),
        ("link remove 4294967295", "LINK DEL 4294967295"),
        ("LINKS?", "LINKS?"),
        ("links", "LINKS?"),
        ("EDGES?", "LINKS?"),
        ("link list", "LINKS?"),
        (
            "ROUTE ADD any 52:54:00:00:00:02 edge 10.0.0.2 any",
            "ROUTE ADD any 52:54:00:00:00:02 edge 10.0.0.2 any",
        ),
        (
            "route add NOT-52:54:00:00:00:0A NONE interface 52:54:00:00:00:02 EDGE 10.0.0.2:9000",
            "ROUTE ADD not-52:54:00:00:00:0a none interface 52:54:00:00:00:02 edge 10.0.0.2:9000",
        ),
        (
            "route add any any link h2 device vm1 network=7",
            "ROUTE ADD any any edge h2 interface vm1 network=7",
        ),
        (
            "route add any any edge fd00::2 interface network=7",
            "ROUTE ADD any any edge fd00::2 interface network=7",
        ),
        ("route add any any edge 10.0.0.2 edge", "ROUTE ADD any any edge 10.0.0.2 edge"),
        ("ROUTE DELETE 3", "ROUTE DEL 3"),
        ("route move 52:54:00:00:00:01 link h2", "ROUTE MOVE 52:54:00:00:00:01 edge h2"),
        (
            "route move 52:54:00:00:00:01 device vm1 network=7",
            "ROUTE MOVE 52:54:00:00:00:01 interface vm1 network=7",
        ),
        ("ROUTES? 100", "ROUTES? 100"),
        ("INTERFACES?", "INTERFACES?"),
        ("DEVICES?", "INTERFACES?"),
        ("DEVICE ADD c1 TAP device=eth0 netns=1", "INTERFACE ADD c1 tap device=eth0 netns=1"),
        ("INTERFACE DEL 2", "INTERFACE DEL 2"),
        ("stats?", "STATS?"),
        ("HELLO vnet console", "HELLO"),
        ("help", "HELP"),
        ("?", "HELP"),
        ("DONE", "DONE"),
        ("quit", "DONE"),
    ] {
        assert_eq!(console(line).map(|command| command.to_string()).as_deref(), Ok(want), "{line}");
    }
}

#[test]
fn files_of_vnet_p_need_no_noun() {
    let links = parse(Dialect::Links, "ADD 10.0.0.2 9000 udp").unwrap();
    assert_eq!(links, console("LINK ADD 10.0.0.2 9000 udp").unwrap());
    assert_eq!(parse(Dialect::Links, "del 2"), Ok(Command::DeleteLink(2)));
    let route = parse(Dialect::Routes, "ADD any any edge 10.0.0.2 any").unwrap();
    assert_eq!(route, console("ROUTE ADD any any edge 10.0.0.2 any").unwrap());
    assert_eq!(parse(Dialect::Routes, "DEL 2"), Ok(Command::DeleteRoute(2)));
    assert_eq!(
        parse(Dialect::Routes, "LINK DEL 2"),
        Ok(Command::DeleteLink(2)),
        "a noun is understood still"
    );
    assert!(console("ADD 10.0.0.2 9000 udp").is_err());
}

#[test]
fn mistakes_name_the_syntax() {
    for (line, words) in [
        ("LINC ADD", "'LINC' is not a command"),
        ("LINK", "a verb is missing"),
        ("LINK MAKE", "'MAKE' is neither ADD, DEL nor LIST"),
        ("LINK ADD", "the IP address is missing; write LINK ADD IP PORT"),
        ("LINK ADD host 9000", "the IP address cannot be 'host'"),
        ("LINK ADD 10.0.0.2 65536", "the port cannot be '65536'"),
        ("LINK ADD 10.0.0.2 9000 sctp", "'sctp' is one word too many"),
        ("LINK ADD 10.0.0.2 9000 mtu=1 MTU=2", "'mtu' is given twice"),
        ("LINK ADD 10.0.0.2 9000 remote=x", "'remote' is given twice"),
        ("LINK DEL", "the index is missing"),
        ("LINK DEL -1", "the index cannot be '-1'"),
        ("LINK DEL 1 2", "'2' is one word too many"),
        ("ROUTE ADD any 52:54 edge 10.0.0.2 any", "the destination cannot be '52:54'"),
        ("ROUTE ADD any any any", "frames cannot go to 'any'"),
        ("ROUTE ADD any any hub x any", "'hub' is neither edge nor interface"),
        ("ROUTE ADD any any edge 10.0.0.2", "any, edge or interface is missing"),
        ("ROUTE ADD any any edge 10.0.0.2 any any", "'any' is one word too many"),
        ("ROUTE ADD any any edge 10.0.0.2 any mtu=3", "no key 'mtu'"),
        ("ROUTE ADD any any edge 10.0.0.2 any network=16777216", "is not a network"),
        ("DONE now", "'now' is one word too many"),
    ] {
        let told = console(line).unwrap_err().to_string();
        assert!(told.contains(words) && told.lines().count() == 1, "{line}: {told}");
    }
}

#[test]
fn lines_are_bounded() {
    let line = format!("HELLO {}", "x".repeat(LINE_MAX - 6));
    assert_eq!(console(&line), Ok(Command::Hello));
    assert_eq!(console(&(line.clone() + "x")), Err(LanguageError::TooLong));
    // Displayed, the transport is added.
    let line = |len: usize| format!("LINK ADD fd00::2 9000 name={}", "x".repeat(len));
    let [fits, fits_not] = [LINE_MAX - 31, LINE_MAX - 30].map(|len| console(&line(len)));
    assert_eq!(fits.map(|command| command.to_string().len()), Ok(LINE_MAX));
    assert_eq!(fits_not, Err(LanguageError::TooLong));
    assert_eq!(parse_bytes(Dialect::Console, b"\xff"), Err(LanguageError::NotText));
}

#[test]
fn every_documented_command_is_parsed() {
    for usage in COMMANDS {
        let told = console(usage.words);
        assert!(!matches!(told, Err(LanguageError::Unknown(_))), "{}: {told:?}", usage.words);
        for synonym in usage.synonyms.split(", ").filter(|words| !words.is_empty() && !words.contains("for"))
        {
            match (console(synonym), &told) {
                (Ok(command), Ok(want)) => assert_eq!(command, *want, "{synonym}"),
                (Err(LanguageError::Usage { syntax, .. }), Err(_)) => {
                    assert_eq!(syntax, usage.syntax, "{synonym}")
                }
                (other, _) => panic!("{synonym}: {other:?}"),
            }
        }
    }
}

/// Words for random lines, valid and invalid.
const WORDS: [&str; 40] = [
    "LINK",
    "ADD",
    "DEL",
    "ROUTE",
    "INTERFACE",
    "LINKS?",
    "ROUTES?",
    "STATS?",
    "INTERFACES?",
    "DEVICE",
    "edge",
    "interface",
    "any",
    "none",
    "10.0.0.2",
    "fd00::2",
    "10.0.0.2:9000",
    "[fd00::2]:1",
    "9000",
    "0",
    "65536",
    "52:54:00:00:00:01",
    "not-52:54:00:00:00:01",
    "52:54",
    "udp",
    "tcp",
    "tap",
    "name=a",
    "networks=1,x",
    "mtu=",
    "=",
    "a=b=c",
    "network=1",
    "network=99999999",
    "#",
    "list",
    "\u{1F600}",
    "\0",
    "4294967296",
    "true=false",
];

/// A simple random number generator with a fixed seed.
pub struct Random(pub u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

/// Valid lines to mutate.
const LINES: [&str; 9] = [
    "LINK ADD 10.0.0.2 9000 udp",
    "LINK ADD 10.0.0.2 9000 name=a networks=1",
    "LINK DEL 1",
    "ROUTE ADD any 52:54:00:00:00:01 edge 10.0.0.2 any",
    "ROUTE ADD not-52:54:00:00:00:01 none interface 52:54:00:00:00:01 edge 10.0.0.2:9000 network=1",
    "ROUTE DEL 1",
    "ROUTE MOVE 52:54:00:00:00:01 edge 10.0.0.2 network=1",
    "INTERFACE DEL 1",
    "ROUTES? 1",
];

/// Writes a random line: random words, or a valid line with one word replaced; sometimes with an invalid byte.
pub fn random_line(random: &mut Random, line: &mut Vec<u8>) {
    line.clear();
    let right = LINES[random.below(LINES.len())];
    let (right, length) = if random.below(2) == 0 { (right, 0) } else { ("", random.below(9)) };
    for word in right.split_ascii_whitespace() {
        let other = random.below(12) == 0;
        let word = if other { WORDS[random.below(WORDS.len())] } else { word };
        line.extend_from_slice(word.as_bytes());
        line.push(b' ');
    }
    for _ in 0..length {
        line.extend_from_slice(WORDS[random.below(WORDS.len())].as_bytes());
        line.push(b' ');
    }
    if random.below(4) == 0 {
        let at = random.below(line.len() + 1);
        line.insert(at, random.below(256) as u8);
    }
}

#[test]
fn a_million_random_lines() {
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let (mut understood, mut line) = (0, vec![]);
    for round in 0..1_000_000 {
        random_line(&mut random, &mut line);
        let dialect = [Dialect::Console, Dialect::Links, Dialect::Routes][round % 3];
        match parse_bytes(dialect, &line) {
            Ok(command) => {
                understood += 1;
                let again = command.to_string();
                assert_eq!(console(&again), Ok(command), "{again}");
            }
            Err(error) => assert!(error.to_string().len() < 1000, "{error}"),
        }
    }
    // The word list reaches every command.
    assert!(understood > 200_000, "{understood}");
}

proptest! {
    #[test]
    fn any_text_is_a_command_or_a_mistake(line in ".{0,300}", word in 0..WORDS.len()) {
        for line in [line.clone(), format!("{} {line}", WORDS[word])] {
            if let Ok(command) = console(&line) {
                prop_assert_eq!(console(&command.to_string()), Ok(command));
            }
        }
    }
}
