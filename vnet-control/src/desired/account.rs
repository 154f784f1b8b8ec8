//! Users and groups by name. The name service may ask other hosts and never answer, and whoever opens an interface holds the
//! engine's lock: names are looked up on threads of their own, and the interface is tried again while there is no answer.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::unistd::{Group, User};
use parking_lot::{Condvar, Mutex};

/// Longest name of a user or group (`LOGIN_NAME_MAX` less the final zero).
const NAME_LEN_MAX: usize = 255;
/// Longest wait for the name service. Files answer within a millisecond.
const LOOKUP: Duration = Duration::from_millis(100);
/// How long an answer that came too late is kept: longer than an interface waits between two attempts.
const KEPT: Duration = Duration::from_secs(30);

/// A user or group, by name or number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account(String);

/// Why the number of an account is not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AccountError {
    #[error("{kind} '{name}' does not exist on this host; give its number")]
    Unknown { kind: Kind, name: String },
    #[error("{kind} '{name}' cannot be looked up ({error}); give its number")]
    Failed { kind: Kind, name: String, error: String },
    #[error(
        "waiting for the name service: it has not told the number of {kind} '{name}' yet; give its number"
    )]
    Pending { kind: Kind, name: String },
}

impl AccountError {
    /// Why an interface is down, if the number may still come.
    pub(crate) fn waits_for(&self) -> Option<String> {
        matches!(self, AccountError::Pending { .. }).then(|| self.to_string())
    }
}

/// What a name names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    User,
    Group,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::User => "user",
            Kind::Group => "group",
        })
    }
}

impl FromStr for Account {
    type Err = String;

    fn from_str(text: &str) -> Result<Account, String> {
        let odd = |c: char| c.is_whitespace() || c.is_control() || c == ':' || c == '/';
        if text.is_empty() || text.len() > NAME_LEN_MAX || text.starts_with('-') || text.contains(odd) {
            return Err("it takes a name or a number, as in \"tenant1\" or \"1001\"".into());
        }
        Ok(Account(text.into()))
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Account {
    /// The number of the user.
    pub(super) fn uid(&self) -> Result<u32, AccountError> {
        self.number(Kind::User)
    }

    /// The number of the group.
    pub(super) fn gid(&self) -> Result<u32, AccountError> {
        self.number(Kind::Group)
    }

    fn number(&self, kind: Kind) -> Result<u32, AccountError> {
        static LOOKUPS: Lookups = Lookups { pending: Mutex::new(BTreeMap::new()), find: ask_name_service };
        match self.0.parse() {
            Ok(number) => Ok(number),
            Err(_) => LOOKUPS.number(kind, &self.0),
        }
    }
}

/// The number of an account, if it exists, or why it cannot be looked up.
type Answer = Result<Option<u32>, String>;

/// Asks the name service. May block.
fn ask_name_service(kind: Kind, name: &str) -> Answer {
    let found = match kind {
        Kind::User => User::from_name(name).map(|user| user.map(|user| user.uid.as_raw())),
        Kind::Group => Group::from_name(name).map(|group| group.map(|group| group.gid.as_raw())),
    };
    found.map_err(|error| error.desc().into())
}

/// A lookup under way, or one whose answer nobody has taken.
struct Lookup {
    since: Instant,
    answer: Mutex<Option<Answer>>,
    answered: Condvar,
}

impl Lookup {
    /// The answer, if it comes within `time` of the lookup's begin.
    fn wait(&self, time: Duration) -> Option<Answer> {
        let mut answer = self.answer.lock();
        if answer.is_none() {
            self.answered.wait_until(&mut answer, self.since + time);
        }
        answer.clone()
    }

    fn is_overdue(&self) -> bool {
        self.since.elapsed() >= LOOKUP && self.answer.lock().is_none()
    }

    fn is_outdated(&self) -> bool {
        self.since.elapsed() >= KEPT && self.answer.lock().is_some()
    }
}

/// Lookups by name: at most one for each at a time, so that a silent service costs one thread for each configured name.
struct Lookups {
    pending: Mutex<BTreeMap<(Kind, String), Arc<Lookup>>>,
    find: fn(Kind, &str) -> Answer,
}

impl Lookups {
    /// The number of an account. Waits at most [`LOOKUP`], and not at all while another lookup has taken longer.
    fn number(&self, kind: Kind, name: &str) -> Result<u32, AccountError> {
        let failed = |error| AccountError::Failed { kind, name: name.into(), error };
        let key = (kind, name.to_string());
        let (lookup, is_slow) = self.begin(&key).map_err(failed)?;
        let Some(answer) = lookup.wait(if is_slow { Duration::ZERO } else { LOOKUP }) else {
            return Err(AccountError::Pending { kind, name: name.into() });
        };
        // Asked anew the next time: accounts change.
        self.pending.lock().remove(&key);
        answer.map_err(failed)?.ok_or_else(|| AccountError::Unknown { kind, name: name.into() })
    }

    /// Begins a lookup unless it is under way. Returns it, and whether the service is slow.
    fn begin(&self, key: &(Kind, String)) -> Result<(Arc<Lookup>, bool), String> {
        let mut pending = self.pending.lock();
        let is_slow = pending.values().any(|other| other.is_overdue());
        if let Some(lookup) = pending.get(key).filter(|lookup| !lookup.is_outdated()) {
            return Ok((lookup.clone(), is_slow));
        }
        let (since, answer, answered) = (Instant::now(), Mutex::new(None), Condvar::new());
        let lookup = Arc::new(Lookup { since, answer, answered });
        let (find, (kind, name), to) = (self.find, key.clone(), lookup.clone());
        let look = move || {
            let answer = find(kind, &name);
            *to.answer.lock() = Some(answer);
            to.answered.notify_all();
        };
        std::thread::Builder::new().name("name-service".into()).spawn(look).map_err(|e| e.to_string())?;
        pending.insert(key.clone(), lookup.clone());
        Ok((lookup, is_slow))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_are_names_or_numbers() {
        let account = |text: &str| text.parse::<Account>().unwrap();
        assert_eq!(account("1001").uid().unwrap(), 1001);
        assert_eq!((account("root").uid().unwrap(), account("root").gid().unwrap()), (0, 0));
        let error = account("no-such-user-here").uid().unwrap_err();
        assert_eq!(
            error.to_string(),
            "user 'no-such-user-here' does not exist on this host; give its number"
        );
        assert_eq!(error.waits_for(), None);
        for bad in ["", "-1", "a b", "a:b", "a\0"] {
            assert!(bad.parse::<Account>().is_err(), "{bad:?}");
        }
    }

    /// A service that does not answer keeps nobody waiting; its answer is taken when it comes.
    #[test]
    fn a_silent_name_service_keeps_nobody_waiting() {
        static SILENCE: Mutex<()> = Mutex::new(());
        let find = |_: Kind, name: &str| {
            drop(SILENCE.lock());
            Ok(Some(name.len() as u32))
        };
        let lookups = Lookups { pending: Mutex::new(BTreeMap::new()), find };
        let silence = SILENCE.lock();
        let began = Instant::now();
        for name in ["a", "bb", "a", "ccc"] {
            let error = lookups.number(Kind::User, name).unwrap_err();
            assert!(error.waits_for().is_some_and(|why| why.contains("name service")), "{error}");
        }
        // Each of them alone would have waited.
        assert!(began.elapsed() >= LOOKUP);
        assert_eq!(lookups.pending.lock().len(), 3, "one thread for each name");
        drop(silence);
        let answered = |name| loop {
            match lookups.number(Kind::User, name) {
                Err(AccountError::Pending { .. }) => std::thread::yield_now(),
                result => break result.unwrap(),
            }
        };
        assert_eq!([answered("a"), answered("bb"), answered("ccc")], [1, 2, 3]);
        assert!(lookups.pending.lock().is_empty());
    }
}
