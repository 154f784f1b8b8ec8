//! The filter language: what parses, what is refused, and what matches.

use super::*;
use proptest::prelude::*;

const MACS: [u8; 12] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];

/// An IPv4 packet from 10.0.0.1 to 10.0.0.2 in a frame, with a VLAN tag if `vlan` is given.
fn ipv4_frame(protocol: u8, fragment: u16, vlan: Option<u16>, transport: &[u8]) -> Vec<u8> {
    let mut frame = MACS.to_vec();
    if let Some(vlan) = vlan {
        frame.extend([0x81, 0, (vlan >> 8) as u8, vlan as u8]);
    }
    frame.extend([8, 0, 0x45, 0, 0, 40, 0, 0, (fragment >> 8) as u8, fragment as u8, 64, protocol, 0, 0]);
    frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend(transport);
    frame
}

fn arp_frame() -> Vec<u8> {
    let mut frame = MACS.to_vec();
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1]);
    frame.extend([0, 0, 0, 0, 0, 0, 10, 0, 0, 2]);
    frame
}

fn ipv6_frame(next: u8, rest: &[u8]) -> Vec<u8> {
    let mut frame = MACS.to_vec();
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 8, next, 64]);
    for last in [1, 2] {
        frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
    }
    frame.extend(rest);
    frame
}

fn matches(filter: &str, frame: &[u8]) -> bool {
    let subject = Subject { head: frame, len: frame.len(), network: NetworkId::DEFAULT, inbound: true };
    filter.parse::<Filter>().unwrap_or_else(|error| panic!("{filter}: {error}")).matches(&subject)
}

#[test]
fn primitives_match_what_they_name() {
    let tcp = ipv4_frame(ip::TCP, 0, None, &[0, 80, 0x1f, 0x90, 0, 0, 0, 0]);
    let udp = ipv4_frame(ip::UDP, 0, Some(7), &[0, 53, 0x1f, 0x90, 0, 0, 0, 0]);
    let later = ipv4_frame(ip::TCP, 9, None, &[0, 80, 0x1f, 0x90]);
    let (arp, six) = (arp_frame(), ipv6_frame(ip::UDP, &[0, 53, 0, 54, 0, 0, 0, 0]));
    let all = [&tcp, &udp, &later, &arp, &six];
    for (filter, which) in [
        ("", "tula6"),
        ("arp", "a"),
        ("ip", "tul"),
        ("ip6", "6"),
        ("tcp", "tl"),
        ("tcp port 80", "t"),
        ("tcp dst port 80", ""),
        ("tcp src port 79-81", "t"),
        ("port 53", "u6"),
        ("udp port 53 and ip6", "6"),
        ("src port 53 or dst port 8080", "tu6"),
        ("host 10.0.0.2", "tula"),
        ("src host 10.0.0.2", ""),
        ("dst host 10.0.0.2", "tula"),
        ("net 10.0.0.0/30", "tula"),
        ("net 10.0.1.0/24", ""),
        ("net 0.0.0.0/0", "tula"),
        ("host fd00::1", "6"),
        ("net fd00::/8", "6"),
        ("vlan", "u"),
        ("vlan 7", "u"),
        ("vlan 8", ""),
        ("not vlan and ip", "tl"),
        ("ether host 02:00:00:00:00:01", "tula6"),
        ("ether src 02:00:00:00:00:02", ""),
        ("ether proto 0x806", "a"),
        ("network 1", "tula6"),
        ("network 2", ""),
        ("inbound", "tula6"),
        ("outbound", ""),
        ("multicast or broadcast", ""),
        ("greater 43", "u6"),
        ("less 42 and not less 41", "ta"),
        ("!(tcp or udp)", "a"),
        ("! tcp && ! udp || arp", "a"),
        ("arp or ip and udp", "ua"),
        ("(arp or ip) and udp", "u"),
        ("not not arp", "a"),
    ] {
        let found: String =
            all.iter().zip("tula6".chars()).filter(|(f, _)| matches(filter, f)).map(|(_, c)| c).collect();
        assert_eq!(found, which, "{filter}");
    }
}

#[test]
fn syntax_errors_name_the_word_and_what_is_allowed() {
    let refused = |text: &str| text.parse::<Filter>().unwrap_err().to_string();
    for (text, word) in [
        ("tcpp", "'tcpp' is not a primitive"),
        ("host", "'the end' is not an IP address"),
        ("host nowhere", "'nowhere' is not an IP address"),
        ("net 10.0.0.0/33", "is not a network"),
        ("port 70000", "'70000' is not a port"),
        ("port 9-8", "'9-8' is not a port"),
        ("vlan 5000", "'5000' is not a VLAN id"),
        ("(arp", "'the end' is not ')'"),
        ("arp udp", "'udp' is not 'and', 'or' or the end"),
        ("arp and", "'the end' is not a primitive"),
        ("src arp", "'arp' is not 'host', 'net' or 'port'"),
        ("ether host 1.2.3.4", "'1.2.3.4' is not a MAC address"),
        ("network 16777216", "is not a network id"),
        ("\u{1b}[2J", "'[2J' is not a primitive"),
    ] {
        assert!(refused(text).contains(word), "{text}: {}", refused(text));
    }
    assert_eq!("a".repeat(EXPRESSION_MAX + 1).parse::<Filter>(), Err(FilterError::TooLong));
    assert_eq!(("(".repeat(40) + "arp" + &")".repeat(40)).parse::<Filter>(), Err(FilterError::TooMuch));
    assert_eq!(("not ".repeat(40) + "arp").parse::<Filter>(), Err(FilterError::TooMuch));
    assert_eq!(("arp or ".repeat(300) + "arp").parse::<Filter>(), Err(FilterError::TooMuch));
}

/// An expression tree, evaluated naively: the oracle for the stack machine.
#[derive(Clone, Debug)]
enum Tree {
    Leaf(&'static str),
    Not(Box<Tree>),
    And(Box<Tree>, Box<Tree>),
    Or(Box<Tree>, Box<Tree>),
}

impl Tree {
    fn text(&self) -> String {
        match self {
            Tree::Leaf(text) => (*text).into(),
            Tree::Not(tree) => format!("not {}", tree.text()),
            Tree::And(a, b) => format!("({} and {})", a.text(), b.text()),
            Tree::Or(a, b) => format!("({} or {})", a.text(), b.text()),
        }
    }

    fn holds(&self, frame: &[u8]) -> bool {
        match self {
            Tree::Leaf(text) => matches(text, frame),
            Tree::Not(tree) => !tree.holds(frame),
            Tree::And(a, b) => a.holds(frame) & b.holds(frame),
            Tree::Or(a, b) => a.holds(frame) | b.holds(frame),
        }
    }
}

fn tree() -> impl Strategy<Value = Tree> {
    let leaf = prop::sample::select(vec!["arp", "ip", "tcp", "vlan", "host 10.0.0.1", "port 80"])
        .prop_map(Tree::Leaf);
    leaf.prop_recursive(8, 40, 2, |inner| {
        let pair = (inner.clone(), inner.clone());
        prop_oneof![
            inner.prop_map(|tree| Tree::Not(tree.into())),
            pair.clone().prop_map(|(a, b)| Tree::And(a.into(), b.into())),
            pair.prop_map(|(a, b)| Tree::Or(a.into(), b.into())),
        ]
    })
}

proptest! {
    #[test]
    fn the_machine_agrees_with_the_tree(tree in tree(), vlan: bool) {
        let text = tree.text();
        for frame in [arp_frame(), ipv4_frame(ip::TCP, 0, vlan.then_some(3), &[0, 80, 0, 81, 0, 0])] {
            prop_assert_eq!(matches(&text, &frame), tree.holds(&frame), "{}", text);
        }
        let filter: Filter = text.parse().unwrap();
        prop_assert_eq!(filter.to_string().parse::<Filter>(), Ok(filter));
    }

    /// On truncated frames, a filter that tests every field never panics, and its negation gives the opposite result.
    #[test]
    fn cut_frames_do_no_harm(cut in 0usize..80, noise in prop::collection::vec(any::<u8>(), 0..80), which in 0usize..4) {
        let mut frame = match which {
            0 => arp_frame(),
            1 => ipv4_frame(ip::TCP, 0, Some(1), &noise),
            2 => ipv6_frame(noise.first().copied().unwrap_or(0), &noise),
            _ => [&MACS[..], &noise].concat(),
        };
        frame.truncate(cut);
        let all = "vlan 1 or host 10.0.0.1 or net fd00::/8 or tcp port 80 or icmp6 or ether proto 0x88b5";
        if frame.len() >= 14 {
            prop_assert_ne!(matches(all, &frame), matches(&format!("not ({all})"), &frame));
        }
    }

    #[test]
    fn any_text_parses_or_is_refused(text in "[a-z0-9 ()!/.:-]{0,80}") {
        if let Ok(filter) = text.parse::<Filter>() {
            filter.matches(&Subject { head: &arp_frame(), len: 42, network: NetworkId::DEFAULT, inbound: false });
            prop_assert_eq!(filter.to_string().parse::<Filter>(), Ok(filter));
        }
    }
}
