//! Tests of the console with a real engine.

use std::path::Path;
use std::sync::{Arc, Mutex};

use super::*;
use crate::config::parse;
use crate::events::{Asker, Event};
use crate::language::tests::{Random, random_line};
use crate::watch::Watch;

fn engine(dir: &Path, more: &str) -> Engine {
    let text = format!("[host]\nname = \"h1\"\n[bridge]\nlisten = \"127.0.0.1:0\"\n{more}");
    Engine::start(parse("f", &text.replace("DIR", dir.to_str().unwrap())).unwrap().desired).unwrap()
}

fn say(engine: &mut Engine, line: &str) -> String {
    answer(engine, Dialect::Console, line.as_bytes()).to_string()
}

/// Sends each line and checks its answer.
fn check_dialogue(engine: &mut Engine, lines: &[(&str, &str)]) {
    for (line, want) in lines {
        assert_eq!(say(engine, line), *want, "{line}");
    }
}

#[test]
fn links_routes_and_interfaces_come_and_go_by_index() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(dir.path(), "");
    let add =
        format!("INTERFACE ADD vm1 vhost-user socket={}/vm1 mac=52:54:00:00:00:01", dir.path().display());
    check_dialogue(
        &mut engine,
        &[
            ("", ""),
            ("# a remark", ""),
            ("LINK ADD 127.0.1.2 9000 udp", "OK link 1\n"),
            ("LINK ADD 127.0.1.3 9000 name=h3 encapsulation=native", "OK link 2\n"),
            (&add, "OK interface 1\n"),
            ("LINKS?", "1 127.0.1.2 9000 udp link1 vnet down\n2 127.0.1.3 9000 udp h3 native down\n.\n"),
            ("INTERFACES?", "1 52:54:00:00:00:01 vm1 vhost-user down mtu=1500 network=1\n.\n"),
            ("ROUTE ADD any 52:54:00:00:00:02 edge 127.0.1.2 any", "OK route 1\n"),
            ("ROUTE ADD any not-52:54:00:00:00:02 interface 52:54:00:00:00:01 edge h3", "OK route 2\n"),
            ("ROUTE ADD none any interface vm1 edge", "OK route 3\n"),
            (
                "ROUTES?",
                "1 any 52:54:00:00:00:02 edge 127.0.1.2:9000 any network=1\n\
                 2 any not-52:54:00:00:00:02 interface vm1 edge 127.0.1.3:9000 network=1\n\
                 3 none any interface vm1 edge network=1\n.\n",
            ),
            ("ROUTES? 3", "3 none any interface vm1 edge network=1\n.\n"),
            ("ROUTE MOVE 52:54:00:00:00:02 edge h3", "OK route 4\n"),
            (
                "ROUTES?",
                "2 any not-52:54:00:00:00:02 interface vm1 edge 127.0.1.3:9000 network=1\n\
                 3 none any interface vm1 edge network=1\n\
                 4 any 52:54:00:00:00:02 edge 127.0.1.3:9000 any network=1\n.\n",
            ),
            ("ROUTE MOVE 52:54:00:00:00:02 edge 127.0.1.2 network=1", "OK route 5\n"),
            ("ROUTE MOVE 52:54:00:00:00:02 edge 127.0.1.2", "OK route 5\n"),
            (
                "ROUTE MOVE 52:54:00:00:00:03 interface vm1",
                "ERROR there is no route to 52:54:00:00:00:03 in network 1; ROUTES? lists them\n",
            ),
            ("ROUTE MOVE 52:54:00:00:00:02 edge h9", "ERROR there is no link to 'h9'; LINKS? lists them\n"),
            ("ROUTE DEL 2", "OK route 2 removed\n"),
            ("ROUTE DEL 2", "ERROR there is no route 2; ROUTES? lists them\n"),
            (
                "LINK DEL 1",
                "ERROR link link1 is named by route 5 (src any, dst 52:54:00:00:00:02, from any, to link link1); delete that first\n",
            ),
            ("ROUTE DEL 5", "OK route 5 removed\n"),
            ("LINK DEL 1", "OK link 1 removed\n"),
            ("LINK ADD 127.0.1.4 9000", "OK link 3\n"),
            ("LINK DEL 1", "ERROR there is no link 1; LINKS? lists them\n"),
            ("ROUTE DEL 3", "OK route 3 removed\n"),
            ("INTERFACE DEL 1", "OK interface 1 removed\n"),
            ("INTERFACES?", ".\n"),
            ("DONE", "OK bye\n"),
        ],
    );
    assert_eq!(engine.routes(), []);
    assert_eq!(engine.links().iter().map(|link| &*link.name).collect::<Vec<_>>(), ["h3", "link3"]);
    engine.stop();
}

#[test]
fn settings_that_a_file_may_not_have_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine =
        engine(dir.path(), "[[link]]\nname = \"h2\"\nremote = \"127.0.1.2:9000\"\ntrusted = true\n");
    for (line, words) in [
        ("LINK ADD 127.0.1.2 9000", "remote 127.0.1.2:9000 is already used"),
        ("LINK ADD 127.0.1.3 0", "has no port"),
        ("LINK ADD 224.0.0.1 9000", "not one host's address"),
        ("LINK ADD 127.0.1.3 9000 name=h2", "the name 'h2' is already used"),
        ("LINK ADD 127.0.1.3 9000 colour=red", "unknown key 'colour'"),
        ("LINK ADD 127.0.1.3 9000 networks=7", "network 7 is not declared"),
        ("INTERFACE ADD c1 tun device=x", "'tun'"),
        ("INTERFACE ADD c1 tap device=x mtu=9", "mtu 9 is beyond the limits"),
        ("ROUTE ADD any any edge 127.0.1.9 any", "no link to 127.0.1.9"),
        ("ROUTE ADD any any edge h9 any", "no link to 'h9'"),
        ("ROUTE ADD any any interface 52:54:00:00:00:09 any", "no interface 52:54:00:00:00:09"),
        ("ROUTE ADD any any edge 127.0.1.2 any network=9", "network 9 is not declared"),
        ("NONSENSE", "not a command"),
    ] {
        let said = say(&mut engine, line);
        assert!(
            said.starts_with("ERROR ") && said.contains(words) && said.lines().count() == 1,
            "{line}: {said}"
        );
    }
    assert_eq!(engine.links().len(), 1);
    // Two links to the same address are distinguished by port.
    assert!(say(&mut engine, "LINK ADD 127.0.1.2 9001").contains("source = \"address-port\""));
    assert_eq!(say(&mut engine, "LINK ADD 127.0.1.2 9001 source=address-port"), "OK link 2\n");
    assert!(say(&mut engine, "ROUTE ADD any any edge 127.0.1.2 any").contains("several links"));
    assert_eq!(say(&mut engine, "ROUTE ADD any any edge 127.0.1.2:9001 any"), "OK route 1\n");
    engine.stop();
}

#[test]
fn a_file_is_answered_line_by_line() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(dir.path(), "");
    let text =
        b"# VNET/P's links\r\nADD 127.0.1.2 9000 udp\r\n\nADD nowhere\nHELLO\nDONE\nADD 127.0.1.3 9000";
    let answers = Script::new(Dialect::Links, text.to_vec()).next(&mut engine);
    let told: Vec<_> =
        answers.iter().map(|answer| (answer.line, answer.good, answer.lines[0].as_str())).collect();
    assert_eq!(told[0], (2, true, "OK link 1"));
    assert_eq!((told[1].0, told[1].1), (4, false));
    assert!(told[2].2.starts_with("OK vnet "));
    assert_eq!(told[3], (6, true, "OK bye"));
    assert_eq!((told.len(), engine.links().len()), (4, 1), "nothing after DONE");
    engine.stop();
}

#[test]
fn a_script_stops_until_its_answers_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(dir.path(), "");
    let help = say(&mut engine, "HELP").len();
    let text = "HELP\n".repeat(1_000) + "LINK ADD 127.0.1.2 9000\n";
    let mut script = Script::new(Dialect::Console, text.clone().into_bytes());
    let first: usize =
        script.next(&mut engine).iter().flat_map(|answer| &answer.lines).map(|line| line.len() + 1).sum();
    assert!(first < ANSWERS_AT_ONCE + help, "{first}");
    assert!(!script.is_done() && engine.links().is_empty(), "nothing after the unread answers was executed");
    let mut last = vec![];
    while !script.is_done() {
        last = script.next(&mut engine);
    }
    let last = last.last().unwrap();
    assert_eq!((last.line, last.lines[0].as_str()), (1_001, "OK link 1"));
    // Lines without answers count towards the limit as well.
    let mut script = Script::new(Dialect::Console, "\n".repeat(LINES_AT_ONCE + 1).into_bytes());
    assert_eq!((script.next(&mut engine), script.is_done()), (vec![], false));
    assert_eq!((script.next(&mut engine), script.is_done()), (vec![], true));
    engine.stop();
}

#[test]
fn replies_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(dir.path(), "");
    for line in [
        format!("ROUTE ADD any any edge 10.0.0.2 any network=={}", "\0".repeat(180)),
        format!("LINK ADD 127.0.1.2 9000 networks={}", "x,".repeat(1_000)),
        format!("LINK ADD 127.0.1.2 9000 {}=1", "\u{1F600}".repeat(900)),
    ] {
        let said = say(&mut engine, &line);
        assert!(said.starts_with("ERROR ") && said.len() <= REPLY_MAX + 1, "{} bytes: {said}", said.len());
    }
    engine.stop();
}

#[test]
fn random_lines_get_well_formed_answers() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(dir.path(), "");
    let mut random = Random(0xD1B5_4A32_D192_ED03);
    let (mut line, mut links) = (vec![], (0, 0));
    for _ in 0..20_000 {
        random_line(&mut random, &mut line);
        let answer = answer(&mut engine, Dialect::Console, &line);
        let text = answer.to_string();
        if let Answer::Ok(text) = &answer
            && text.starts_with("link ")
        {
            let count = if text.ends_with("removed") { &mut links.1 } else { &mut links.0 };
            *count += 1;
        }
        match answer {
            Answer::Nothing => assert_eq!(text, ""),
            Answer::Listing(_) => assert!(text.ends_with("\n.\n") || text == ".\n", "{text}"),
            Answer::Ok(_) | Answer::Done => {
                assert!(text.starts_with("OK ") && text.lines().count() == 1, "{text}")
            }
            Answer::Error(_) => assert!(text.starts_with("ERROR ") && text.lines().count() == 1, "{text}"),
        }
    }
    let (came, went) = links;
    assert!(went > 0, "links come and go");
    assert_eq!(engine.links().len(), came - went);
    engine.stop();
}

#[test]
fn statistics_name_every_port() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(dir.path(), "");
    say(&mut engine, "LINK ADD 127.0.1.2 9000");
    let stats = say(&mut engine, "STATS?");
    let begin: Vec<_> =
        stats.lines().map(|line| line.split(' ').take(2).collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(begin, ["link link1", "bridge bridge", "removed removed", "balance in=0", "."]);
    assert!(say(&mut engine, "HELP").contains("ROUTE ADD SRC DST"));
    engine.stop();
}

#[test]
fn a_listing_names_its_continuation() {
    let lines = || (1..=LISTING_MAX as u32 + 10).map(|index| (index, index.to_string()));
    // A listing of a large table sorts what it shows only.
    let items = || (0..10_000).map(|n| ((n * 7919 + 13) % 10_007, n));
    for (first, count) in [(0, 1), (0, 100), (5000, 100), (9_990, 100), (20_000, 5)] {
        let mut all: Vec<_> = items().filter(|(index, _)| *index >= first).collect();
        all.sort_unstable();
        all.truncate(count);
        assert_eq!(lowest(items(), first, count), all, "{first} {count}");
    }
    let Answer::Listing(shown) = listing("ROUTES?", lines(), 0) else { panic!("a listing") };
    assert_eq!((shown.len(), shown.last().unwrap().as_str()), (LISTING_MAX + 1, "# more: ROUTES? 4097"));
    let Answer::Listing(rest) = listing("ROUTES?", lines(), LISTING_MAX as u32 + 1) else {
        panic!("a listing")
    };
    assert_eq!((rest.len(), rest[0].as_str()), (10, "4097"));
}

#[test]
fn an_error_is_one_line_whatever_it_quotes() {
    let answer = Answer::Error("first\r\n.\n\x1b[2Jthird".into()).to_string();
    assert_eq!(answer, "ERROR first; .; \u{fffd}[2Jthird\n");
}

#[test]
fn changes_are_reported_with_the_requester() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(dir.path(), "");
    let told: Arc<Mutex<Vec<Event>>> = Arc::default();
    let sink = told.clone();
    engine.tell(Box::new(move |event| sink.lock().unwrap().push(event)));
    let mut watch = Watch::default();
    assert_eq!(watch.poll(&engine), [], "nothing to compare with");
    let peer = "127.0.0.1:4000".parse().unwrap();
    for (asker, line) in [
        (Asker::Console(peer), "LINK ADD 127.0.1.2 9000"),
        (Asker::Unix { uid: 1000, pid: Some(77) }, "ROUTE ADD any any edge 127.0.1.2 any"),
        (Asker::Http(peer), "LINK ADD 127.0.1.2 9000"),
    ] {
        engine.on_behalf(asker, |engine| say(engine, line));
    }
    let told: Vec<_> = told
        .lock()
        .unwrap()
        .iter()
        .map(|event| match event {
            Event::Configuration { who, changes, changes_total: 1 } => {
                (who.clone(), changes[0].object.clone())
            }
            other => panic!("{other:?}"),
        })
        .collect();
    let want = [("console client 127.0.0.1:4000", "link"), ("uid 1000 pid 77", "route")];
    assert_eq!(told, want.map(|(who, object)| (who.into(), object.into())), "what was refused is not told");
    let events = watch.poll(&engine);
    let [Event::State { object, name, state, reason: Some(reason), .. }] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!((&object[..], &name[..], &state[..]), ("link", "link1", "down"));
    assert!(reason.contains("nothing came"), "{reason}");
    assert_eq!(watch.poll(&engine), []);
    engine.stop();
}

/// VNET/P's own encapsulation has no encryption, so the console implies a trusted path for it; others must set `trusted`.
#[test]
fn clear_text_is_trusted_in_the_encapsulation_of_vnet_p_only() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(dir.path(), "");
    for encapsulation in ["native", "vxlan"] {
        let line = format!("LINK ADD 10.9.0.2 9000 udp encapsulation={encapsulation}");
        let said = say(&mut engine, &line);
        assert!(said.starts_with("ERROR ") && said.contains("clear text"), "{said}");
    }
    assert_eq!(engine.links().len(), 0);
    assert_eq!(
        say(&mut engine, "LINK ADD 10.9.0.2 9000 udp encapsulation=native trusted=true"),
        "OK link 1\n"
    );
    assert_eq!(say(&mut engine, "LINK ADD 10.9.0.3 9000 udp"), "OK link 2\n");
    assert_eq!(say(&mut engine, "LINK ADD 10.9.0.4 9000 encapsulation=vnet"), "OK link 3\n");
    engine.stop();
}

/// Two rules of equal priority both receive a frame: the trace and the check report that.
#[test]
fn routes_that_share_frames_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let text = "[host]\nname = \"h1\"\n[bridge]\nlisten = \"127.0.0.1:0\"\n\
                [[link]]\nname = \"h2\"\nremote = \"127.0.1.2:9000\"\n\
                [[link]]\nname = \"h3\"\nremote = \"127.0.1.3:9000\"\n\
                [[interface]]\nname = \"vm1\"\nkind = \"vhost-user\"\nsocket = \"DIR/vm1\"\n\
                [[route]]\ndst = \"any\"\nto = \"link h2\"\n[[route]]\ndst = \"52:54:00:00:00:03\"\nto = \"link h3\"\n";
    let text = text.replace("DIR", dir.path().to_str().unwrap());
    let configuration = parse("f.toml", &text).unwrap();
    let warnings: Vec<_> = configuration.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(
        warnings[0].starts_with("f.toml:15: the route (src any, dst any, from any, to link h2) has the same"),
        "{warnings:?}"
    );
    assert!(warnings[0].contains("to link h3) (f.toml:18): both get the frames"), "{warnings:?}");
    let engine = Engine::start(configuration.desired).unwrap();
    let macs =
        ["52:54:00:00:00:01", "52:54:00:00:00:03", "52:54:00:00:00:04"].map(|mac| mac.parse().unwrap());
    let from = Target::Interface("vm1".into());
    let trace = |dst| engine.trace(vnet::frame::NetworkId::DEFAULT, macs[0], dst, Some(&from)).unwrap();
    let both = trace(macs[1]);
    assert_eq!(both.why, "route 1 and 2 of priority 6; two rules of equal priority: both get the frame");
    assert_eq!(both.to, ["link h2", "link h3"]);
    assert_eq!(trace(macs[2]).why, "route 1 of priority 6");
    engine.stop();
    // The remedy that the warning proposes removes it.
    let text = text.replace("dst = \"any\"", "dst = \"not-00:00:00:00:00:00\"");
    let configuration = parse("f.toml", &text).unwrap();
    assert!(configuration.warnings.is_empty(), "{:?}", configuration.warnings);
    let engine = Engine::start(configuration.desired).unwrap();
    let trace = |dst| engine.trace(vnet::frame::NetworkId::DEFAULT, macs[0], dst, Some(&from)).unwrap().to;
    assert_eq!((trace(macs[1]), trace(macs[2])), (vec!["link h3".into()], vec!["link h2".into()]));
    engine.stop();
}
